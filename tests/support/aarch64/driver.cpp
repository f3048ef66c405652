// driver FILE ADDRESS BYTES: maps the tensors of another process at the same addresses, and calls kernels on them.
#include "driver.h"

#include "../../../csrc/cpu/reproducible.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <sstream>

int main(int, char** arguments) {
  void* const place = reinterpret_cast<void*>(std::strtoull(arguments[2], nullptr, 10));
  const int file = open(arguments[1], O_RDWR);
  const size_t bytes = std::strtoull(arguments[3], nullptr, 10);
  if (mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != place) return 3;
  driver::kernels()["reproduce"] = driver::Call<&transformer_kernels::reproduce>::run;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::string name;
    line >> name;
    const auto found = driver::kernels().find(name);
    if (found == driver::kernels().end()) return 4;
    found->second(line);
    std::string left;
    std::cout << (line >> left ? "too many arguments" : line.eof() ? "done" : "too few arguments") << std::endl;
  }
}
