// How an operation offers its host functions to Python: after the definition of `softmax_forward` in
// csrc/cuda/launchers/softmax.cu, TK_EXPORT(softmax_forward) makes it callable as `_kernels.softmax_forward(...)`,
// positionally; a function of one structure (csrc/calls) as `_kernels.norm_forward(dtype=..., rows=..., ...)`, which
// names its fields in order and returns a function of the addresses that it leaves out.
// The module adds whatever was linked in: a new operation needs no other edit.
//
// Calls go straight through the vector-call convention, and this header needs only Python.h,
// of which it uses the stable ABI.
#pragma once
#include <Python.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace transformer_kernels {

// Tensors cross the boundary as addresses; 0 stands for an absent one.
using Address = uint64_t;
template <class T> T* pointer(Address address) { return reinterpret_cast<T*>(static_cast<uintptr_t>(address)); }

using FastCall = PyObject* (*)(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names);

struct Export {
  const char* name;
  FastCall call;
};
std::vector<Export>& exports();

// The C++ type of a structure has `fields(visit)`, which calls visit(name, member) for each field. Inside another
// structure it is passed as the tuple of its fields in order.
template <class T> T from_python(PyObject* object) {
  if constexpr (std::is_same_v<T, bool>) {
    return PyObject_IsTrue(object) == 1;
  } else if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(object)));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(PyFloat_AsDouble(object));
  } else if constexpr (std::is_unsigned_v<T>) {
    return static_cast<T>(PyLong_AsUnsignedLongLong(object));
  } else {
    static_assert(std::is_integral_v<T>, "exported functions take numbers, flags and addresses, or one structure");
    return static_cast<T>(PyLong_AsLongLong(object));
  }
}

template <class T> PyObject* to_object(T& value) {
  if constexpr (std::is_class_v<T>) {
    PyObject* values = PyList_New(0);
    value.fields([&](const char*, auto& field) {
      PyObject* each = to_object(field);
      PyList_Append(values, each);
      Py_DECREF(each);
    });
    PyObject* tuple = PyList_AsTuple(values);
    Py_DECREF(values);
    return tuple;
  } else if constexpr (std::is_same_v<T, bool>) {
    return PyBool_FromLong(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return PyFloat_FromDouble(value);
  } else if constexpr (std::is_unsigned_v<T>) {
    return PyLong_FromUnsignedLongLong(value);
  } else {
    return PyLong_FromLongLong(value);
  }
}

// Called with (name, names of the fields or (), arguments) before a kernel that this thread calls; null: none.
inline thread_local PyObject* recorder = nullptr;

inline bool record(const char* name, PyObject* names, PyObject* arguments) {
  PyObject* result = PyObject_CallFunction(recorder, "sNN", name, names, arguments);
  Py_XDECREF(result);
  return result;
}

template <class F> PyObject* without_exceptions(const F& run) {
  try {
    run();
    Py_RETURN_NONE;
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A structure whose constant fields are set; `open` are the offsets of the addresses that each call gives.
template <class T> struct Bound {
  void (*kernel)(const T&);
  T fields{};
  std::vector<size_t> open;
  PyMethodDef definition{};

  template <class Field> void read(Field& field, PyObject* object) {
    if constexpr (std::is_class_v<Field>) {
      Py_ssize_t count = 0, index = 0;
      field.fields([&](const char*, auto&) { ++count; });
      if (!PyTuple_Check(object) || PyTuple_Size(object) != count) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of %zd fields", count);
        return;
      }
      field.fields([&](const char*, auto& each) { read(each, PyTuple_GetItem(object, index++)); });
    } else if (std::is_same_v<Field, Address> && object == Py_None) {
      open.push_back(static_cast<size_t>(reinterpret_cast<char*>(&field) - reinterpret_cast<char*>(&fields)));
    } else {
      field = from_python<Field>(object);
    }
  }

  PyObject* run(T& all) const {
    if (recorder) {
      PyObject* names = PyList_New(0);
      all.fields([&](const char* name, auto&) {
        PyObject* each = PyUnicode_FromString(name);
        PyList_Append(names, each);
        Py_DECREF(each);
      });
      if (!record(definition.ml_name, names, to_object(all))) return nullptr;
    }
    return without_exceptions([&] { kernel(all); });
  }
};

// Of a tensor, None (0) or a number, which is the address itself.
inline Address address_of(PyObject* object) {
  static PyObject* const method = PyUnicode_InternFromString("data_ptr");
  if (object == Py_None) return 0;
  if (PyLong_Check(object)) return from_python<Address>(object);
  PyObject* address = PyObject_CallMethodObjArgs(object, method, nullptr);
  if (!address) return 0;
  const Address result = from_python<Address>(address);
  Py_DECREF(address);
  return result;
}

template <class T> PyObject* call_bound(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const auto* bound = static_cast<const Bound<T>*>(PyCapsule_GetPointer(self, nullptr));
  const auto expected = static_cast<Py_ssize_t>(bound->open.size());
  if (count != expected)
    return PyErr_Format(PyExc_TypeError, "%s takes %zd addresses, got %zd", bound->definition.ml_name, expected, count);
  T all = bound->fields;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Address address = address_of(arguments[i]);
    *reinterpret_cast<Address*>(reinterpret_cast<char*>(&all) + bound->open[static_cast<size_t>(i)]) = address;
    if (PyErr_Occurred()) return nullptr;
  }
  return bound->run(all);
}

// Runs a kernel with all fields of its structure, given by position. By name, in order, addresses may be missing, or
// None inside another structure: it then returns a function of these, in order, that takes tensors,
// None for an absent one, or addresses.
template <class T>
PyObject* call_fields(void (*kernel)(const T&), const char* name, PyObject* const* arguments, Py_ssize_t given,
                      PyObject* names) {
  Bound<T> bound{kernel};
  bound.definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_bound<T>)), METH_FASTCALL,
                      nullptr};
  const Py_ssize_t count = given + (names ? PyTuple_Size(names) : 0);
  Py_ssize_t index = 0;
  bound.fields.fields([&](const char* field, auto& member) {
    if (PyErr_Occurred()) return;
    if (index < given ||
        (index < count && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, index - given), field) == 0))
      bound.read(member, arguments[index++]);
    else if (names && std::is_same_v<std::remove_reference_t<decltype(member)>, Address>) bound.read(member, Py_None);
    else PyErr_Format(PyExc_TypeError, "%s: %s is missing, or not in its position", name, field);
  });
  if (!PyErr_Occurred() && index != count)
    PyErr_Format(PyExc_TypeError, "%s: %zd of %zd arguments are fields in order", name, index, count);
  if (PyErr_Occurred()) return nullptr;
  if (bound.open.empty()) return bound.run(bound.fields);
  auto* kept = new Bound<T>(std::move(bound));
  PyObject* self = PyCapsule_New(
      kept, nullptr, [](PyObject* capsule) { delete static_cast<Bound<T>*>(PyCapsule_GetPointer(capsule, nullptr)); });
  PyObject* function = PyCFunction_NewEx(&kept->definition, self, nullptr);
  Py_DECREF(self);
  return function;
}

// Runs a kernel of numbers and addresses, given by position.
template <class... Parameters, size_t... INDEX>
PyObject* call_values(void (*kernel)(Parameters...), const char* name, PyObject* const* arguments,
                      std::index_sequence<INDEX...>) {
  const std::tuple<Parameters...> values{from_python<Parameters>(arguments[INDEX])...};
  if (PyErr_Occurred()) return nullptr;
  if (recorder && !record(name, PyTuple_New(0), PyTuple_Pack(sizeof...(Parameters), arguments[INDEX]...)))
    return nullptr;
  return without_exceptions([&] { kernel(std::get<INDEX>(values)...); });
}

template <class... Parameters>
PyObject* call_checked(void (*kernel)(Parameters...), const char* name, PyObject* const* arguments, Py_ssize_t count,
                       PyObject* names) {
  if constexpr (sizeof...(Parameters) == 1 && (std::is_reference_v<Parameters> && ...)) {  // a structure
    return call_fields(kernel, name, arguments, count, names);
  } else if (names || count != static_cast<Py_ssize_t>(sizeof...(Parameters))) {
    return PyErr_Format(PyExc_TypeError, "%s takes %zu arguments, got %zd", name, sizeof...(Parameters), count);
  } else {
    return call_values(kernel, name, arguments, std::index_sequence_for<Parameters...>{});
  }
}

struct Registration {
  Registration(const char* name, FastCall call) { exports().push_back({name, call}); }
};

#define TK_EXPORT(function)                                                                                    \
  static PyObject* call_##function(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) { \
    return ::transformer_kernels::call_checked(function, #function, arguments, count, names);                  \
  }                                                                                                            \
  static const ::transformer_kernels::Registration registration_of_##function(#function, call_##function)

}  // namespace transformer_kernels
