// How an operation offers its host functions to Python: after the definition of `softmax_forward` in csrc/ops/softmax.cu,
// TK_EXPORT(softmax_forward) makes it callable as `_kernels.softmax_forward(...)`, positionally; a function of one structure
// (csrc/calls) as `_kernels.norm_forward(dtype=..., x=..., ...)`, which names all fields in order. bindings.cpp adds
// whatever was linked in, so nothing else has to be edited for a new operation.
//
// Calls go straight through the vector-call convention, and this header needs only Python.h, of which it uses the stable ABI.
#pragma once
#include <Python.h>

#include <atomic>
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

// The C++ type of a structure has `fields(visit)`, which calls visit(name, member) for each field. Inside another structure
// it is passed as the tuple of its fields in order.
template <class T> T from_python(PyObject* object) {
  if constexpr (std::is_same_v<T, bool>) {
    return PyObject_IsTrue(object) == 1;
  } else if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(object)));
  } else if constexpr (std::is_class_v<T>) {
    T result{};
    Py_ssize_t count = 0;
    result.fields([&](const char*, auto&) { ++count; });
    if (!PyTuple_Check(object) || PyTuple_Size(object) != count) {
      PyErr_Format(PyExc_TypeError, "expected a tuple of %zd fields", count);
      return result;
    }
    Py_ssize_t place = 0;
    result.fields([&](const char*, auto& field) {
      field = from_python<std::remove_reference_t<decltype(field)>>(PyTuple_GetItem(object, place++));
    });
    return result;
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(PyFloat_AsDouble(object));
  } else if constexpr (std::is_unsigned_v<T>) {
    return static_cast<T>(PyLong_AsUnsignedLongLong(object));
  } else {
    static_assert(std::is_integral_v<T>, "exported functions take numbers, flags, addresses and structures of them");
    return static_cast<T>(PyLong_AsLongLong(object));
  }
}

// Whether a function takes one structure by reference, whose fields are its arguments.
template <class... Parameters> constexpr bool takes_fields() {
  return sizeof...(Parameters) == 1 && (std::is_reference_v<Parameters> && ...);
}
template <class... Parameters>
using First = std::remove_cv_t<std::remove_reference_t<std::tuple_element_t<0, std::tuple<Parameters...>>>>;

template <class... Parameters, size_t... INDEX>
void call_with(void (*function)(Parameters...), PyObject* const* arguments, std::index_sequence<INDEX...>) {
  const std::tuple<Parameters...> values{from_python<Parameters>(arguments[INDEX])...};
  if (!PyErr_Occurred()) function(std::get<INDEX>(values)...);
}

// A structure from its fields, one argument each. A call by name has the names of its fields, which Python keeps in one
// tuple for each place in its code: they are compared once for the tuple in `checked`.
template <class T>
bool from_fields(T& result, const char* name, PyObject* const* arguments, Py_ssize_t given, PyObject* names,
                 std::atomic<PyObject*>& checked) {
  const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
  const bool compare = named > 0 && names != checked.load(std::memory_order_relaxed);
  Py_ssize_t place = 0;
  result.fields([&](const char* field, auto& member) {
    if (place < given + named && !PyErr_Occurred()) {
      if (compare && place >= given &&
          PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, place - given), field) != 0)
        PyErr_Format(PyExc_TypeError, "%s: argument %zd must be %s, got %U", name, place, field,
                     PyTuple_GetItem(names, place - given));
      else
        member = from_python<std::remove_reference_t<decltype(member)>>(arguments[place]);
    }
    ++place;
  });
  if (PyErr_Occurred()) return false;
  if (place != given + named) {
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, place, given + named);
    return false;
  }
  PyObject* none = nullptr;
  if (compare && checked.compare_exchange_strong(none, names)) Py_INCREF(names);  // kept: its address stays its own
  return true;
}

template <class... Parameters>
PyObject* call_checked(void (*function)(Parameters...), const char* name, PyObject* const* arguments, Py_ssize_t count,
                       PyObject* names, std::atomic<PyObject*>& checked) {
  try {
    if constexpr (takes_fields<Parameters...>()) {
      First<Parameters...> all{};
      if (from_fields(all, name, arguments, count, names, checked)) function(all);
    } else if (names || count != static_cast<Py_ssize_t>(sizeof...(Parameters))) {
      return PyErr_Format(PyExc_TypeError, "%s takes %zu arguments, got %zd", name, sizeof...(Parameters), count);
    } else {
      call_with(function, arguments, std::index_sequence_for<Parameters...>{});
    }
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

struct Registration {
  Registration(const char* name, FastCall call) { exports().push_back({name, call}); }
};

#define TK_EXPORT(function)                                                                                \
  static PyObject* call_##function(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) { \
    static std::atomic<PyObject*> checked{nullptr};                                                        \
    return ::transformer_kernels::call_checked(function, #function, arguments, count, names, checked);     \
  }                                                                                                        \
  static const ::transformer_kernels::Registration registration_of_##function(#function, call_##function)

}  // namespace transformer_kernels
