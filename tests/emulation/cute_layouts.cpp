// Prints CuTe's layouts of everything that attention's kernels lay out by hand, one integer a line, for layouts.cu.
#include <cstdint>
#include <cstdio>

#include <cute/tensor.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

using namespace cute;
namespace GMMA = SM90::GMMA;

// Of every (thread, value) the row and the column, of a matrix of ROWS rows.
template <int ROWS, class Layout> void print_fragment(Layout layout) {
  for (int thread = 0; thread < size<0>(layout); ++thread)
    for (int value = 0; value < size<1>(layout); ++value) {
      const int place = layout(thread, value);
      std::printf("%d\n%d\n", place % ROWS, place / ROWS);
    }
}

// The offset of every element of a tile in shared memory, in elements.
template <class Layout> void print_tile(Layout flagged) {
  const auto layout = as_position_independent_swizzle_layout(flagged);  // else the pointer swizzles
  for (int row = 0; row < size<0>(layout); ++row)
    for (int column = 0; column < size<1>(layout); ++column) std::printf("%d\n", static_cast<int>(layout(row, column)));
}

// Of each step of 16 along the summed axis: the descriptor without its address, and the address in elements.
template <GMMA::Major MAJOR, class Layout> void print_descriptors(Layout layout) {
  const auto tile = make_tensor(make_smem_ptr(static_cast<half_t*>(nullptr)), layout);
  const auto step = Shape<decltype(size<0>(layout)), _16>{};
  for (int i = 0; i < size<1>(layout) / 16; ++i) {
    const auto part = local_tile(tile, step, make_coord(0, i));
    auto descriptor = GMMA::make_gmma_desc<MAJOR>(part);
    descriptor.bitfield.start_address_ = 0;
    const auto start = reinterpret_cast<uintptr_t>(raw_pointer_cast(part.data())) / sizeof(half_t);
    std::printf("%llu\n%llu\n", static_cast<unsigned long long>(descriptor.desc_),
                static_cast<unsigned long long>(start));
  }
}

template <int ROWS, int COLUMNS> void print_summed_along_columns() {
  const auto layout = tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Shape<Int<ROWS>, Int<COLUMNS>>{});
  print_tile(layout);
  print_descriptors<GMMA::Major::K>(layout);
}

// N columns of KEYS rows, as [N, KEYS]; panels of 64 columns follow one another.
template <int N, int KEYS> void print_summed_along_rows() {
  const auto layout = tile_to_shape(GMMA::Layout_MN_SW128_Atom<half_t>{}, Shape<Int<N>, Int<KEYS>>{}, Step<_2, _1>{});
  print_tile(layout);
  print_descriptors<GMMA::Major::MN>(layout);
}

int main() {
  using Warp = MMA_Traits<SM80_16x8x16_F32F16F16F32_TN>;
  print_fragment<16>(Warp::ALayout{});
  print_fragment<8>(Warp::BLayout{});
  print_fragment<16>(Warp::CLayout{});
  print_fragment<64>(GMMA::ALayout_64x16{});
  print_fragment<64>(GMMA::CLayout_64xN<64>{});
  print_fragment<64>(GMMA::CLayout_64xN<128>{});
  print_summed_along_columns<128, 64>();
  print_summed_along_columns<128, 128>();
  print_summed_along_rows<64, 128>();
  print_summed_along_rows<128, 128>();
}
