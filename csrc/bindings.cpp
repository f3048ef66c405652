// The module `_kernels`: what the build knows about itself, and the functions of every operation in csrc/ops.
// pybind11 only: tensors arrive as addresses, sizes and strides, so one build serves every release of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "build_info.h"
#include "device.h"
#include "registry.h"
#if defined(TK_EMULATED)
#include "emulation/engine.h"
#endif

namespace py = pybind11;

namespace transformer_kernels {

std::vector<Export>& exports() {
  static std::vector<Export> all;
  return all;
}

std::vector<Structure>& exported_structures() {
  static std::vector<Structure> all;
  return all;
}

namespace {

// The names of the fields of each structure, by its name: what Python's side of it must have.
py::dict structures() {
  py::dict result;
  for (const Structure& structure : exported_structures()) result[structure.name] = py::tuple(py::cast(structure.fields));
  return result;
}

void add_exports(py::module_& m) {
  // Python keeps pointers to these definitions for as long as the process runs.
  auto* definitions = new std::vector<PyMethodDef>();
  for (const Export& e : exports())
    definitions->push_back({e.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(e.call)), METH_FASTCALL, nullptr});
  for (PyMethodDef& definition : *definitions)
    m.add_object(definition.ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(&definition, nullptr)));
}

}  // namespace

#if defined(TK_EMULATED)
namespace {

void set_schedule(const std::string& kind, uint64_t seed) {
  using emulation::ScheduleKind;
  if (kind == "lowest_first") {
    emulation::set_schedule({ScheduleKind::LOWEST_FIRST, seed});
  } else if (kind == "one_warp_ahead") {
    emulation::set_schedule({ScheduleKind::ONE_WARP_AHEAD, seed});
  } else if (kind == "random") {
    emulation::set_schedule({ScheduleKind::RANDOM, seed});
  } else {
    throw py::value_error("schedule must be lowest_first, one_warp_ahead or random; got " + kind);
  }
}

py::dict counters() {
  py::dict result;
  const emulation::Counters values = emulation::counters();
  for (size_t i = 0; i < emulation::COUNTER_COUNT; ++i) result[emulation::COUNTER_NAMES[i]] = values[i];
  return result;
}

void bind_emulation(py::module_& m) {
  m.def("set_schedule", &set_schedule, py::arg("kind"), py::arg("seed") = 0,
        "The order in which the emulation runs threads: lowest_first, one_warp_ahead or random, with a seed.");
  m.def("counters", &counters, "What all launches since reset_counters() have counted.");
  m.def("launches", &emulation::launches,
        "Threads of a block and bytes of shared memory in the last launch of each kernel since reset_counters().");
  m.def("reset_counters", &emulation::reset_counters);
}

}  // namespace
#endif

}  // namespace transformer_kernels

PYBIND11_MODULE(_kernels, m, py::mod_gil_not_used()) {
  using namespace transformer_kernels;
  m.attr("source_hash") = source_hash();
  m.attr("architectures") = architectures();
#if defined(TK_EMULATED)
  m.attr("emulated") = true;
  bind_emulation(m);
#else
  m.attr("emulated") = false;
#endif
  m.def("device_problem", &device_problem, "Why this build cannot run on the device, or an empty string.");
  m.def("multiprocessors", &device_multiprocessors);
  m.def("shared_memory_per_block", &device_shared_memory_per_block);
  m.attr("structures") = structures();
  add_exports(m);
}
