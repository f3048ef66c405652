// The kernels of the CPU backend in a program without Python and torch. A line of its input is a kernel's name and its
// arguments, structures as their fields in order; the program calls it and prints a line.
#pragma once
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>

namespace driver {

template <class T> T read(std::istream& line) {
  if constexpr (std::is_class_v<T>) {
    T all{};
    all.fields([&](const char*, auto& field) { field = read<std::remove_reference_t<decltype(field)>>(line); });
    return all;
  } else {
    std::string word;
    line >> word;
    if constexpr (std::is_floating_point_v<T>) return static_cast<T>(std::strtod(word.c_str(), nullptr));
    else if constexpr (std::is_unsigned_v<T>) return static_cast<T>(std::strtoull(word.c_str(), nullptr, 10));
    else return static_cast<T>(std::strtoll(word.c_str(), nullptr, 10));
  }
}

template <auto FUNCTION> struct Call;
template <class... Parameters, void (*FUNCTION)(Parameters...)> struct Call<FUNCTION> {
  static void run(std::istream& line) {
    const std::tuple<std::decay_t<Parameters>...> values{read<std::decay_t<Parameters>>(line)...};
    std::apply(FUNCTION, values);
  }
};

using Kernels = std::map<std::string, void (*)(std::istream&)>;
inline Kernels& kernels() {
  static Kernels all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)(std::istream&)) { kernels()[name] = run; }
};

}  // namespace driver

#define DRIVE(function)                                         \
  static const driver::Registration registration_of_##function( \
      #function, driver::Call<&transformer_kernels::plain::function>::run);
