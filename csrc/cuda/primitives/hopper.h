// sm_90a features: barriers in shared memory that count bytes (mbarrier), bulk tensor copies (TMA), and warp group
// products (wgmma) with operands in shared memory. PTX ISA: "mbarrier", "cp.async.bulk.tensor",
// "Asynchronous warpgroup level matrix instructions".
//
// A kernel that uses them must be empty if TK_HOPPER is not defined: in device passes for other architectures.
#pragma once
#include <atomic>
#include <stdexcept>

#include "driver.h"
#include "memory.h"
#include "numbers.h"
#if !defined(__CUDACC__)
#include "../../emulation/hopper.h"
#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TK_HOPPER 1
#endif

namespace transformer_kernels {

inline constexpr int WARP_GROUP_SIZE = 128;
inline constexpr int PANEL_COLUMNS = 64;  // 16-bit elements: a swizzled tile in shared memory is 128 bytes wide

// The descriptor of a wgmma operand: panels of 64 columns, each with rows of 128 bytes, 1024-byte aligned, in the
// 128-byte swizzle (16-byte chunk c of row r is stored at chunk c ^ r % 8). Groups of 8 rows are 1024 bytes apart.
// Panels of an operand whose columns are not the summed axis (b of Wgmma::from_registers) are `panel_bytes` apart.
TK_DEVICE uint64_t swizzled_descriptor(const void* shared, int panel_bytes) {
  return static_cast<uint64_t>((shared_address(shared) & 0x3ffffu) >> 4) |
         static_cast<uint64_t>(panel_bytes >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | uint64_t{1} << 62;
}

// The descriptor of the address `bytes` further in shared memory: one addition instead of six instructions.
TK_DEVICE uint64_t descriptor_after(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

#if defined(__CUDACC__)

using TensorMap = CUtensorMap;

// Describes a tensor [batches, heads, rows, columns] of 16-bit elements (strides in elements; address and strides must
// be multiples of 16 bytes) to the copy engine, which fetches boxes of `box_rows` rows and 64 columns, zero-filled
// outside.
template <class T>
inline TensorMap tensor_map(const void* data, int64_t columns, int64_t rows, int64_t heads, int64_t batches,
                            int64_t row_stride, int64_t head_stride, int64_t batch_stride, unsigned box_rows) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static std::atomic<Encode> known{nullptr};
  Encode encode = known.load(std::memory_order_relaxed);
  if (!encode) known.store(encode = driver_function<Encode>("cuTensorMapEncodeTiled"), std::memory_order_relaxed);
  if (!encode) throw std::runtime_error("attention: the CUDA driver has no cuTensorMapEncodeTiled; update the driver");
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batches)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(row_stride) * 2, static_cast<cuuint64_t>(head_stride) * 2,
                                 static_cast<cuuint64_t>(batch_stride) * 2};
  const cuuint32_t box[4] = {PANEL_COLUMNS, box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr auto TYPE = std::is_same_v<T, float16> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  TensorMap map;
  if (encode(&map, TYPE, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled refused the tensor");
  return map;
}

#if defined(TK_HOPPER)

TK_DEVICE void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes the initialised barriers visible to the copy engine; a __syncthreads() must follow for the threads.
TK_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TK_DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and keeps the phase incomplete until `bytes` more have been copied.
TK_DEVICE void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is complete. Phases alternate, starting with parity 0; waiting for parity 1 on a
// new barrier returns immediately.
TK_DEVICE void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\n"
      "bra AGAIN;\nREADY:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// One thread starts the copy of a box; the barrier counts its bytes.
TK_DEVICE void copy_tensor_box(void* shared, const TensorMap& map, int column, int row, int head, int batch,
                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// Makes shared memory written by ordinary stores visible to wgmma; each writing thread calls it before a barrier.
TK_DEVICE void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All threads of a warp group call these together. Accumulators and register operands are owned by wgmma from the fence
// before their first use until the wait.
TK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> TK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Pins registers that wgmma reads or writes: the compiler does not move their ordinary uses across this point. The
// fence and the wait alone do not guarantee this, because they do not name registers.
template <int COUNT> TK_DEVICE void wgmma_pin(float (&registers)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    asm volatile(""
                 : "+f"(registers[i][0]), "+f"(registers[i][1]), "+f"(registers[i][2]),
                   "+f"(registers[i][3])::"memory");
}
template <int COUNT> TK_DEVICE void wgmma_pin(uint32_t (&registers)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    asm volatile(""
                 : "+r"(registers[i][0]), "+r"(registers[i][1]), "+r"(registers[i][2]),
                   "+r"(registers[i][3])::"memory");
}

// Forces the computation of `first` and `second` before a following wgmma_wait; the compiler would move it behind the
// wait and lose the overlap with the product. `slot` is private to this thread in shared memory and is never read.
TK_DEVICE void finish_before_wait(float2* slot, float first, float second) {
  asm volatile("st.volatile.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared_address(slot)), "f"(first), "f"(second)
               : "memory");
}

template <int COUNT> TK_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> TK_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// The products. d [N / 8][4] has the per-warp layout of mma.m16n8k16 accumulators (matrix.h); warp w of the group
// owns rows 16 w to 16 w + 15 of 64.
//   from_shared:    d (64 x N) = a (64 x 16) b (N x 16)^T, added to d if `accumulate`
//   from_registers: d (64 x N) += a (64 x 16, registers as of mma) b (16 x N)
template <class T, int N> struct Wgmma;

#define TK_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define TK_D32 TK_D4(0), TK_D4(1), TK_D4(2), TK_D4(3), TK_D4(4), TK_D4(5), TK_D4(6), TK_D4(7)
#define TK_D64 TK_D32, TK_D4(8), TK_D4(9), TK_D4(10), TK_D4(11), TK_D4(12), TK_D4(13), TK_D4(14), TK_D4(15)
#define TK_D128                                                                                              \
  TK_D64, TK_D4(16), TK_D4(17), TK_D4(18), TK_D4(19), TK_D4(20), TK_D4(21), TK_D4(22), TK_D4(23), TK_D4(24), \
      TK_D4(25), TK_D4(26), TK_D4(27), TK_D4(28), TK_D4(29), TK_D4(30), TK_D4(31)
#define TK_REGISTERS32                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define TK_REGISTERS64                                                                                               \
  TK_REGISTERS32                                                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TK_REGISTERS128                                                                          \
  TK_REGISTERS64                                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// P0 to P5 are the indices of the operands after the accumulators.
#define TK_WGMMA(TYPE, PTX, N, D, REGISTERS, P0, P1, P2, P3, P4, P5)                                                   \
  template <> struct Wgmma<TYPE, N> {                                                                                  \
    static TK_DEVICE void from_shared(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX \
                   "." PTX " {" REGISTERS "}, %" P0 ", %" P1 ", p, 1, 1, 0, 0;\n}"                                     \
                   : D                                                                                                 \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                 \
    }                                                                                                                  \
    static TK_DEVICE void from_registers(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX \
                   "." PTX " {" REGISTERS "}, {%" P0 ", %" P1 ", %" P2 ", %" P3 "}, %" P4 ", p, 1, 1, 1;\n}"           \
                   : D                                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                      \
    }                                                                                                                  \
  }

TK_WGMMA(float16, "f16", 64, TK_D32, TK_REGISTERS32, "32", "33", "34", "35", "36", "37");
TK_WGMMA(bfloat16, "bf16", 64, TK_D32, TK_REGISTERS32, "32", "33", "34", "35", "36", "37");
TK_WGMMA(float16, "f16", 128, TK_D64, TK_REGISTERS64, "64", "65", "66", "67", "68", "69");
TK_WGMMA(bfloat16, "bf16", 128, TK_D64, TK_REGISTERS64, "64", "65", "66", "67", "68", "69");
TK_WGMMA(float16, "f16", 256, TK_D128, TK_REGISTERS128, "128", "129", "130", "131", "132", "133");
TK_WGMMA(bfloat16, "bf16", 256, TK_D128, TK_REGISTERS128, "128", "129", "130", "131", "132", "133");

#undef TK_WGMMA
#undef TK_REGISTERS128
#undef TK_REGISTERS64
#undef TK_REGISTERS32
#undef TK_D128
#undef TK_D64
#undef TK_D32
#undef TK_D4

#endif  // TK_HOPPER

#else

#define __grid_constant__

using TensorMap = emulation::TensorMap;

template <class T>
inline TensorMap tensor_map(const void* data, int64_t columns, int64_t rows, int64_t heads, int64_t batches,
                            int64_t row_stride, int64_t head_stride, int64_t batch_stride, unsigned box_rows) {
  return emulation::encode_tensor_map(data, {columns, rows, heads, batches},
                                      {2, 2 * row_stride, 2 * head_stride, 2 * batch_stride}, box_rows);
}

TK_DEVICE void barrier_init(uint64_t* barrier, int arrivals) { emulation::mbarrier_init(barrier, arrivals); }
TK_DEVICE void barrier_init_fence() { emulation::fence_mbarrier_init(); }
TK_DEVICE void barrier_arrive(uint64_t* barrier) { emulation::mbarrier_arrive(barrier, 0); }
TK_DEVICE void barrier_arrive_expecting(uint64_t* barrier, int bytes) { emulation::mbarrier_arrive(barrier, bytes); }
TK_DEVICE void barrier_wait(uint64_t* barrier, int parity) { emulation::mbarrier_wait(barrier, parity); }
TK_DEVICE void copy_tensor_box(void* shared, const TensorMap& map, int column, int row, int head, int batch,
                               uint64_t* barrier) {
  emulation::copy_tensor_box(shared, map, {column, row, head, batch}, barrier);
}
TK_DEVICE void fence_for_async() { emulation::fence_async_proxy(); }

TK_DEVICE void wgmma_fence() { emulation::wgmma_fence(); }
TK_DEVICE void wgmma_commit() { emulation::wgmma_commit(); }
template <int PENDING> TK_DEVICE void wgmma_wait() { emulation::wgmma_wait(PENDING); }
template <class T, int COUNT> TK_DEVICE void wgmma_pin(T (&)[COUNT][4]) {}
TK_DEVICE void finish_before_wait(float2* slot, float first, float second) {
  store_vector<2>(reinterpret_cast<float*>(slot), Vector<float, 2>{{first, second}});
}
template <int COUNT> TK_DEVICE void give_registers() { emulation::set_registers(COUNT); }
template <int COUNT> TK_DEVICE void take_registers() { emulation::set_registers(COUNT); }

template <class T, int N> struct Wgmma {
  static constexpr bool IS_FLOAT16 = std::is_same_v<T, float16>;
  static TK_DEVICE void from_shared(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
    emulation::wgmma({&d[0][0], nullptr, a, b, N, accumulate != 0, false, IS_FLOAT16});
  }
  static TK_DEVICE void from_registers(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {
    emulation::wgmma({&d[0][0], a, 0, b, N, true, true, IS_FLOAT16});
  }
};

#endif

}  // namespace transformer_kernels
