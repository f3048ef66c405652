// How an operation offers its host functions to Python: after the definition of `softmax_forward` in csrc/ops/softmax.cu,
// TK_EXPORT(softmax_forward) makes it callable as `_kernels.softmax_forward(...)`, positionally. bindings.cpp adds whatever
// was linked in, so nothing else has to be edited for a new operation.
//
// Calls go straight through the vector-call convention, and this header needs only
// Python.h, which nvcc reads much faster than pybind11.
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

using FastCall = PyObject* (*)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

struct Export {
  const char* name;
  FastCall call;
};
std::vector<Export>& exports();

// A structure crosses the boundary as a tuple of its fields in order. Its C++ type has `fields(visit)`, which calls
// visit(name, member) for each; the module's `structures` tells Python the names.
struct Structure {
  const char* name;
  std::vector<const char*> fields;
};
std::vector<Structure>& exported_structures();

template <class T> T from_python(PyObject* object) {
  if constexpr (std::is_same_v<T, bool>) {
    return PyObject_IsTrue(object) == 1;
  } else if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(object)));
  } else if constexpr (std::is_class_v<T>) {
    T result{};
    Py_ssize_t count = 0;
    result.fields([&](const char*, auto&) { ++count; });
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != count) {
      PyErr_Format(PyExc_TypeError, "expected a tuple of %zd fields", count);
      return result;
    }
    Py_ssize_t place = 0;
    result.fields([&](const char*, auto& field) {
      field = from_python<std::remove_reference_t<decltype(field)>>(PyTuple_GET_ITEM(object, place++));
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

template <class... Parameters, size_t... INDEX>
void call_with(void (*function)(Parameters...), PyObject* const* arguments, std::index_sequence<INDEX...>) {
  const std::tuple<Parameters...> values{from_python<Parameters>(arguments[INDEX])...};
  if (!PyErr_Occurred()) function(std::get<INDEX>(values)...);
}

template <class... Parameters>
PyObject* call_checked(void (*function)(Parameters...), const char* name, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(sizeof...(Parameters)))
    return PyErr_Format(PyExc_TypeError, "%s takes %zu arguments, got %zd", name, sizeof...(Parameters), count);
  try {
    call_with(function, arguments, std::index_sequence_for<Parameters...>{});
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

template <class T> struct StructureRegistration {
  explicit StructureRegistration(const char* name) {
    Structure structure{name, {}};
    T{}.fields([&](const char* field, auto&) { structure.fields.push_back(field); });
    exported_structures().push_back(std::move(structure));
  }
};

#define TK_EXPORT_STRUCTURE(type) \
  static const ::transformer_kernels::StructureRegistration<type> structure_registration_of_##type(#type)

#define TK_EXPORT(function)                                                                                \
  static PyObject* call_##function(PyObject*, PyObject* const* arguments, Py_ssize_t count) {              \
    return ::transformer_kernels::call_checked(function, #function, arguments, count);                     \
  }                                                                                                        \
  static const ::transformer_kernels::Registration registration_of_##function(#function, call_##function)

}  // namespace transformer_kernels
