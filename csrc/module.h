// A Python module of exported kernels, by Python.h alone and its stable ABI:
// one build serves every Python from 3.10 on. TK_FUNCTION(f, doc) offers a function that returns a value,
// called by position; kernels come from registry.h.
#pragma once
#include "registry.h"

#include <map>
#include <string>

namespace transformer_kernels {

template <> inline std::string from_python<std::string>(PyObject* object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  return text ? std::string(text, static_cast<size_t>(size)) : std::string();
}

inline PyObject* to_python(const std::string& text) {
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}
inline PyObject* to_python(const char* text) { return PyUnicode_FromString(text); }
inline PyObject* to_python(bool value) { return PyBool_FromLong(value); }
inline PyObject* to_python(int value) { return PyLong_FromLong(value); }
inline PyObject* to_python(unsigned long value) { return PyLong_FromUnsignedLong(value); }
inline PyObject* to_python(unsigned long long value) { return PyLong_FromUnsignedLongLong(value); }
template <class A, class B> PyObject* to_python(const std::pair<A, B>& both) {
  return Py_BuildValue("(NN)", to_python(both.first), to_python(both.second));
}
template <class T> PyObject* to_python(const std::vector<T>& values) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), to_python(values[i]));
  return tuple;
}
template <class T> PyObject* to_python(const std::map<std::string, T>& values) {
  PyObject* dict = PyDict_New();
  for (const auto& [name, value] : values) {
    PyObject* item = to_python(value);
    PyDict_SetItemString(dict, name.c_str(), item);
    Py_DECREF(item);
  }
  return dict;
}

template <auto FUNCTION> struct Function;
template <class R, class... Parameters, R (*FUNCTION)(Parameters...)> struct Function<FUNCTION> {
  template <size_t... INDEX> static PyObject* result(PyObject* const* arguments, std::index_sequence<INDEX...>) {
    const std::tuple<std::decay_t<Parameters>...> values{from_python<std::decay_t<Parameters>>(arguments[INDEX])...};
    if (PyErr_Occurred()) return nullptr;
    if constexpr (std::is_void_v<R>) {
      FUNCTION(std::get<INDEX>(values)...);
      Py_RETURN_NONE;
    } else {
      return to_python(FUNCTION(std::get<INDEX>(values)...));
    }
  }

  static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    if (names || count != static_cast<Py_ssize_t>(sizeof...(Parameters)))
      return PyErr_Format(PyExc_TypeError, "expected %zu arguments, got %zd", sizeof...(Parameters), count);
    try {
      return result(arguments, std::index_sequence_for<Parameters...>{});
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  }
};

inline PyMethodDef method(const char* name, FastCall call, const char* doc = nullptr) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL | METH_KEYWORDS, doc};
}
#define TK_FUNCTION(function, doc) \
  ::transformer_kernels::method(#function, ::transformer_kernels::Function<&function>::call, doc)

template <class T> void set(PyObject* module, const char* name, const T& value) {
  PyObject* object = to_python(value);
  PyObject_SetAttrString(module, name, object);
  Py_XDECREF(object);
}

// Adds these functions and every exported kernel; 0, or -1 with an error.
inline int add_functions(PyObject* module, std::vector<PyMethodDef> functions) {
  // Python keeps pointers to these definitions for as long as the process runs.
  auto* definitions = new std::vector<PyMethodDef>(std::move(functions));
  for (const Export& e : exports()) definitions->push_back(method(e.name, e.call));
  definitions->push_back({nullptr, nullptr, 0, nullptr});
  return PyModule_AddFunctions(module, definitions->data());
}

}  // namespace transformer_kernels

// PyInit_name, and below it the body of fill(module), which returns 0, or -1 with an error.
#if defined(Py_mod_gil)
#define TK_MODULE_SLOTS {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#else
#define TK_MODULE_SLOTS
#endif
#define TK_MODULE(name, doc)                                                                                           \
  static int fill_##name(PyObject* module);                                                                            \
  extern "C" __attribute__((visibility("default"))) PyObject* PyInit_##name() {                                        \
    static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(&fill_##name)},                           \
                                       TK_MODULE_SLOTS{0, nullptr}};                                                   \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #name, doc, 0, nullptr, slots, nullptr, nullptr, nullptr}; \
    return PyModuleDef_Init(&definition);                                                                              \
  }                                                                                                                    \
  static int fill_##name(PyObject* module)
