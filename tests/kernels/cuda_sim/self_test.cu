// Kernels that try the simulator itself, correct ones and broken ones.
#include "launch.cuh"
#include "ptx.cuh"

using namespace overstory;

namespace {

constexpr int kThreads = 256;

/// out[i] = in[n - 1 - i] for one block of n threads, through shared memory.
template <bool Synchronised>
__global__ void reverse(const int* in, int* out) {
  int* shared = ptx::shared_memory<int>();
  shared[ptx::thread()] = in[ptx::thread()];
  if (Synchronised) ptx::sync_block();
  out[ptx::thread()] = shared[ptx::block_threads() - 1 - ptx::thread()];
}

/// The same within each warp.
template <bool Synchronised>
__global__ void reverse_in_warp(const int* in, int* out) {
  int* shared = ptx::shared_memory<int>() + ptx::warp() * 32;
  shared[ptx::lane()] = in[ptx::thread()];
  if (Synchronised) ptx::sync_warp();
  out[ptx::thread()] = shared[31 - ptx::lane()];
}

/// Every thread copies `stages` rows of 16 bytes, one group each, and sums words of its own rows.
/// `Wait` groups may be in flight when the first row is read; right for Wait < stages.
template <int Wait>
__global__ void copy_sum(const std::uint32_t* in, std::uint32_t* out, int stages) {
  auto* mine = ptx::shared_memory<std::uint32_t>() + ptx::thread() * stages * 4;
  for (int i = 0; i < stages; ++i) {
    ptx::cp_async_16(mine + 4 * i, in + (ptx::thread() * stages + i) * 4, i != 1);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<Wait>();
  std::uint32_t sum = mine[0] + mine[1] + mine[2] + mine[3];
  ptx::cp_async_wait<0>();
  for (int i = 4; i < 4 * stages; ++i) sum += mine[i];
  out[ptx::thread()] = sum;
}

/// Rounds of two bulk copies of a row each, one by each of the first two warps, into two stages;
/// out[round] is the sum of both rows, if `Awaited`.
template <bool Awaited>
__global__ void bulk_sum(const int* in, int* out, int rounds) {
  constexpr int kRow = 64;
  int* shared = ptx::shared_memory<int>();
  auto* barriers = reinterpret_cast<std::uint64_t*>(shared + 4 * kRow);
  if (ptx::thread() == 0) {
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(barriers + i, 2);
    ptx::mbarrier_fence_init();
  }
  ptx::sync_block();
  for (int round = 0; round < rounds; ++round) {
    int* stage = shared + round % 2 * 2 * kRow;
    if (ptx::warp() < 2 && ptx::lane() == 0) {
      ptx::mbarrier_arrive_expect(barriers + round % 2, 4 * kRow);
      ptx::bulk_copy(stage + ptx::warp() * kRow, in + (2 * round + ptx::warp()) * kRow, 4 * kRow,
                     barriers + round % 2);
    }
    if (Awaited) ptx::mbarrier_wait(barriers + round % 2, static_cast<std::uint32_t>(round / 2 % 2));
    int sum = ptx::thread() < 32 ? 0 : -1;
    for (int i = ptx::lane(); i < 2 * kRow; i += 32) sum += stage[i];
    for (int step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
    if (ptx::thread() == 0) out[round] = sum;
    ptx::sync_block();
  }
  if (!Awaited) {  // it must end well but for its result
    for (int i = 0; i < 2; ++i) ptx::mbarrier_wait(barriers + i, 0);
  }
}

enum class Fault {
  kNone,
  kThreadSkipsBarrier,
  kBarrierInOtherBranch,
  kLaneSkipsShuffle,
  kLaneInOtherCollective,
  kExitBeforeBarrier,
  kCopyNeverAwaited,
  kSharedOverrun,
  kSharedFarOut,
  kMatrixOutOfRange,
  kMatrixUnaligned,
  kHalfWarpInNamedBarrier,
  kPartnersWait,
  kNullPointer,
  kStackOverflow,
  kBulkCopyNeverAwaited,
  kBytesThatNeverCome,
};

__device__ int recurse(volatile int* depth) {
  volatile int room[256];
  room[0] = *depth + 1;
  return room[0] > 0 ? recurse(room) + room[0] : 0;
}

__global__ void broken(int fault, int* out) {
  char* shared = ptx::shared_memory<char>();
  const int thread = ptx::thread();
  std::uint32_t r[4];
  switch (static_cast<Fault>(fault)) {
    case Fault::kNone:
      break;
    case Fault::kThreadSkipsBarrier:
      if (thread != 77) ptx::sync_block();
      ptx::sync_warp();
      break;
    case Fault::kBarrierInOtherBranch:
      if (thread < 32) {
        ptx::sync_block();
      } else {
        ptx::sync_block();
      }
      break;
    case Fault::kLaneSkipsShuffle:
      if (thread != 40) out[thread] = ptx::shfl_xor(thread, 1);
      break;
    case Fault::kLaneInOtherCollective:
      if (thread % 2 == 0) {
        out[thread] = ptx::shfl(thread, 0);
      } else {
        out[thread] = static_cast<int>(ptx::ballot(true));
      }
      break;
    case Fault::kExitBeforeBarrier:
      if (thread == 200) return;
      ptx::sync_block();
      break;
    case Fault::kCopyNeverAwaited:
      ptx::cp_async_16(shared + 16 * thread, out, false);
      ptx::cp_async_commit();
      break;
    case Fault::kSharedOverrun:
      if (thread == 3) shared[4 * kThreads * 4 + 5] = 1;  // in the slack up to 128 bytes
      break;
    case Fault::kSharedFarOut:
      shared[1 << 20] = 1;
      break;
    case Fault::kMatrixOutOfRange:
      ptx::ldmatrix_x4(r, shared + 4 * kThreads * 4 - 16 * ptx::lane());
      break;
    case Fault::kMatrixUnaligned:
      ptx::ldmatrix_x2(*reinterpret_cast<std::uint32_t(*)[2]>(r), shared + 18 * ptx::lane());
      break;
    case Fault::kHalfWarpInNamedBarrier:
      if (ptx::lane() < 16) ptx::sync_named(1, kThreads / 2);
      break;
    case Fault::kPartnersWait:
      if (ptx::warp() == 0) {
        ptx::sync_named(1, 64);
      } else if (ptx::warp() == 1) {
        ptx::sync_named(2, 64);
      }
      break;
    case Fault::kNullPointer:
      if (thread == 9) *static_cast<volatile int*>(nullptr) = 1;
      break;
    case Fault::kStackOverflow:
      out[thread] = recurse(&out[thread]);
      break;
    case Fault::kBulkCopyNeverAwaited:
    case Fault::kBytesThatNeverCome: {
      auto* barrier = reinterpret_cast<std::uint64_t*>(shared);
      if (thread == 0) ptx::mbarrier_init(barrier, 1);
      ptx::sync_block();
      if (thread == 0) {
        ptx::mbarrier_arrive_expect(barrier, 64);
        ptx::bulk_copy(shared + 128, out, 32, barrier);
      }
      if (static_cast<Fault>(fault) == Fault::kBytesThatNeverCome) ptx::mbarrier_wait(barrier, 0);
      break;
    }
  }
  out[thread] = thread;
}

/// `rounds` of a butterfly sum; each thread ends with 32^rounds times the mean of its warp.
__global__ void butterfly(std::uint32_t* values, int rounds) {
  std::uint32_t value = values[ptx::thread()];
  for (int i = 0; i < rounds; ++i) {
    for (int step = 16; step > 0; step /= 2) value += ptx::shfl_xor(value, step);
    ptx::sync_block();
  }
  values[ptx::thread()] = value;
}

/// Producer and consumer warps over named barriers, lines of their own.
__global__ void pass_on(const int* in, int* out, int rounds) {
  int* shared = ptx::shared_memory<int>();
  for (int i = 0; i < rounds; ++i) {
    if (ptx::warp() == 0) {
      shared[ptx::lane()] = in[i * 32 + ptx::lane()];
      ptx::sync_named(1, 64);
      ptx::sync_named(2, 64);
    } else {
      ptx::sync_named(1, 64);
      out[i * 32 + ptx::lane()] = shared[31 - ptx::lane()];
      ptx::arrive_named(2, 64);  // the producer alone waits
    }
  }
}

/// said[round]: how many threads hear that one of them brought `true`, as one does in rounds that are
/// no multiple of three; one barrier a round, so that fast threads bring the next before slow ones leave.
__global__ void block_votes(int* said, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const bool brings = round % 3 != 0 && ptx::thread() == round * 37 % ptx::block_threads();
    if (ptx::sync_block_or(brings)) ptx::atomic_add(said + round, 1);
  }
}

/// results, 32 each: shfl, shfl_up 3, shfl_down 5, ballot, any, all, warp_max, warp_min,
/// warp_sum (of the low 16 bits).
__global__ void votes(const std::uint32_t* in, std::uint32_t* out) {
  const std::uint32_t value = in[ptx::lane()];
  std::uint32_t* mine = out + ptx::lane();
  mine[0] = ptx::shfl(value, static_cast<int>(value % 32));
  mine[32] = ptx::shfl_up(value, 3);
  mine[64] = ptx::shfl_down(value, 5);
  mine[96] = ptx::ballot(value % 3 == 0);
  mine[128] = ptx::any(value % 3 == 0);
  mine[160] = ptx::all(value % 3 == 0);
  mine[192] = ptx::warp_max(value);
  mine[224] = ptx::warp_min(value);
  mine[256] = static_cast<std::uint32_t>(ptx::warp_sum(static_cast<int>(value & 0xffff)));
}

/// d[16, 8] = a[16, K] b^T for b[8, K], one warp, fragments by ldmatrix. TransposedB: b is [K, 8].
template <int K, bool Fp8, bool TransposedB>
__global__ void matmul(const unsigned char* a, const unsigned char* b, float* d) {
  constexpr int kRow = Fp8 ? K : 2 * K;  // bytes of a row of a
  constexpr int kRowB = TransposedB ? 16 : kRow;
  constexpr int kRowsB = TransposedB ? K : 8;
  unsigned char* shared_a = ptx::shared_memory<unsigned char>();
  unsigned char* shared_b = shared_a + 16 * kRow;
  for (int i = ptx::lane(); i < kRow; i += 32) ptx::cp_async_16(shared_a + 16 * i, a + 16 * i);
  for (int i = ptx::lane(); i < kRowsB * kRowB / 16; i += 32) {
    ptx::cp_async_16(shared_b + 16 * i, b + 16 * i);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::sync_warp();
  float sum[4] = {};
  const int lane = ptx::lane();
  for (int at = 0; at < kRow; at += 32) {
    std::uint32_t fa[4], fb[2];
    ptx::ldmatrix_x4(fa, shared_a + (lane % 16) * kRow + at + lane / 16 * 16);
    if (TransposedB) {
      ptx::ldmatrix_x2_trans(fb, shared_b + (at / 2 + lane % 16) * 16);
    } else {
      ptx::ldmatrix_x2(fb, shared_b + (lane % 8) * kRow + at + lane / 8 % 2 * 16);
    }
    if (Fp8) {
      ptx::mma_e4m3_m16n8k32(sum, fa, fb);
    } else {
      ptx::mma_bf16_m16n8k16(sum, fa, fb);
    }
  }
  const int row = lane / 4, column = 2 * (lane % 4);
  d[row * 8 + column] = sum[0];
  d[row * 8 + column + 1] = sum[1];
  d[(row + 8) * 8 + column] = sum[2];
  d[(row + 8) * 8 + column + 1] = sum[3];
}

/// d[8, 16] = a^T for a[16, 8] of bf16 bits, by ldmatrix_x4_trans of two 8 x 8 matrices, twice.
__global__ void transpose(const std::uint16_t* a, std::uint32_t* r) {
  auto* shared = ptx::shared_memory<std::uint16_t>();
  for (int i = ptx::lane(); i < 256; i += 32) shared[i] = a[i];
  ptx::sync_warp();
  std::uint32_t registers[4];
  ptx::ldmatrix_x4_trans(registers, shared + ptx::lane() * 8);
  for (int i = 0; i < 4; ++i) r[ptx::lane() * 4 + i] = registers[i];
}

/// The conversions; n threads in all.
__global__ void convert(const float* in, std::uint32_t* bf16_pair, std::uint16_t* e4m3_pair,
                        float* back) {
  const int i = ptx::block() * ptx::block_threads() + ptx::thread();
  bf16_pair[i] = ptx::pack_bf16x2(in[2 * i], in[2 * i + 1]);
  e4m3_pair[i] = ptx::pack_e4m3x2(in[2 * i], in[2 * i + 1]);
  ptx::unpack_e4m3x2(e4m3_pair[i], back[2 * i], back[2 * i + 1]);
}

/// Blocks add their number; grid and block dimensions as two-dimensional as they get.
__global__ void count_blocks(int* sum, int* seen) {
  if (ptx::thread() == 0) {
    ptx::atomic_add(sum, 1);
    seen[ptx::block_y() * ptx::grid_size() + ptx::block()] = ptx::block_y() * 1000 + ptx::block();
  }
}

__global__ void touch(char* out, int bytes) {
  char* shared = ptx::shared_memory<char>();
  if (ptx::thread() == 0) {
    out[0] = shared[0];
    shared[bytes - 1] = 1;
    out[1] = shared[bytes - 1];
  }
}

}  // namespace

extern "C" int overstory_test_reverse(const int* values, int* out, int threads, int synchronised,
                                      int in_warp, void* stream) {
  const std::size_t bytes = 4u * static_cast<unsigned>(threads);
  auto kernel = in_warp ? (synchronised ? reverse_in_warp<true> : reverse_in_warp<false>)
                        : (synchronised ? reverse<true> : reverse<false>);
  return launch(kernel, 1, threads, bytes, stream, values, out);
}

extern "C" int overstory_test_copy_sum(const std::uint32_t* rows, std::uint32_t* out, int threads,
                                       int stages, int wait, void* stream) {
  const std::size_t bytes = 16u * static_cast<unsigned>(threads * stages);
  auto kernel = wait == 0 ? copy_sum<0> : wait == 1 ? copy_sum<1> : copy_sum<4>;
  return launch(kernel, 1, threads, bytes, stream, rows, out, stages);
}

extern "C" int overstory_test_bulk_sum(const int* rows, int* out, int rounds, int awaited,
                                       void* stream) {
  return launch(awaited != 0 ? bulk_sum<true> : bulk_sum<false>, 1, 96, 4 * 64 * 4 + 16, stream,
                rows, out, rounds);
}

extern "C" int overstory_test_broken(int fault, int* out, void* stream) {
  return launch(broken, 1, kThreads, 4 * kThreads * 4 + (fault == 7 ? 4 : 0), stream, fault, out);
}

extern "C" int overstory_test_butterfly(std::uint32_t* values, int threads, int rounds,
                                        void* stream) {
  return launch(butterfly, 1, threads, 0, stream, values, rounds);
}

extern "C" int overstory_test_pass_on(const int* values, int* out, int rounds, void* stream) {
  return launch(pass_on, 1, 64, 128, stream, values, out, rounds);
}

extern "C" int overstory_test_votes(const std::uint32_t* values, std::uint32_t* out, void* stream) {
  return launch(votes, 1, 32, 0, stream, values, out);
}

extern "C" int overstory_test_block_votes(int* said, int rounds, void* stream) {
  return launch(block_votes, 1, 128, 0, stream, said, rounds);
}

extern "C" int overstory_test_matmul(const unsigned char* a, const unsigned char* b, float* d,
                                     int kind, void* stream) {
  auto kernel = kind == 0   ? matmul<64, false, false>
                : kind == 1 ? matmul<64, false, true>
                            : matmul<128, true, false>;
  return launch(kernel, 1, 32, 24 * 128, stream, a, b, d);
}

extern "C" int overstory_test_transpose(const std::uint16_t* a, std::uint32_t* r, void* stream) {
  return launch(transpose, 1, 32, 512, stream, a, r);
}

extern "C" int overstory_test_convert(const float* values, std::uint32_t* bf16_pair,
                                      std::uint16_t* e4m3_pair, float* back, int blocks,
                                      void* stream) {
  return launch(convert, static_cast<unsigned>(blocks), 64, 0, stream, values, bf16_pair, e4m3_pair,
                back);
}

extern "C" int overstory_test_count_blocks(int* sum, int* seen, int x, int y, void* stream) {
  return launch(count_blocks, dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)), 32, 0,
                stream, sum, seen);
}

extern "C" int overstory_test_touch(char* out, int bytes, int raise_limit, void* stream) {
  if (raise_limit != 0) {
    if (int error = raise_shared_limit<touch>(static_cast<std::size_t>(bytes)); error != 0) {
      return error;
    }
  }
  return launch(touch, 1, 32, static_cast<std::size_t>(bytes), stream, out, bytes);
}
