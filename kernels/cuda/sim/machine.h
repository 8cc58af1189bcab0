// The simulated machine: one block at a time, its threads as fibers in a seeded random order,
// barriers, warp collectives, shared memory, copies in flight, and the checks on all of them.
#pragma once

#include <signal.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"

// Hidden: each library has a simulator of its own, also when a process loads several.
#pragma GCC visibility push(hidden)

namespace overstory::sim {

constexpr int kWarp = 32;
constexpr int kLaunchFailure = 719;  // cudaErrorLaunchFailure
constexpr int kInvalidValue = 1;     // cudaErrorInvalidValue
constexpr std::size_t kSharedLimit = 101376;
constexpr std::size_t kSharedDefault = 49152;
// NaN as float, bf16 and e4m3, and far out of any range as an integer of 16, 32 or 64 bits.
constexpr unsigned char kPoison[2] = {0xFF, 0x7F};

inline void poison(char* at, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) at[i] = static_cast<char>(kPoison[i & 1]);
}

inline bool is_poison(const char* at, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (static_cast<unsigned char>(at[i]) != kPoison[i & 1]) return false;
  }
  return true;
}

/// Place of an intrinsic in a kernel; as a default argument it is that of the caller.
struct Where {
  const char* file;
  int line;
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool same(const Where& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

/// splitmix64: the simulator's dice.
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>(((next() >> 32) * bound) >> 32);
  }
};

struct Dim {
  unsigned x = 1, y = 1;
};

/// One 16-byte cp.async that was issued and not waited for.
struct Copy {
  char* to;
  std::uint32_t group;
  char bytes[16];
};

struct Thread {
  Context context;
  std::unique_ptr<Stack> stack = std::make_unique<Stack>();
  int index = 0;
  bool waiting = false;
  bool exited = false;
  const char* op = "";  // what it waits at
  Where where{"", 0};
  std::vector<Copy> copies;
  std::uint32_t groups = 0;  // committed so far
};

/// A warp collective that some of its lanes have reached.
struct Gathering {
  std::uint32_t mask;
  std::uint32_t arrived;
  const char* op;
  Where where;
  void* lanes[kWarp];
};

struct Barrier {
  int wanted = 0;
  std::vector<int> arrived;
  std::vector<int> waiting;  // of those: the others have gone on
  Where where{"", 0};
};

/// A barrier in shared memory that counts arrivals and bytes (mbarrier).
struct Mbarrier {
  /// A bulk copy that was issued; its bytes appear at the first wait for its phase.
  struct Bulk {
    char* to;
    std::vector<char> bytes;
  };
  const void* at = nullptr;
  int count = 0;               // arrivals that a phase wants
  int arrived = 0;             // in this phase
  std::int64_t missing = 0;    // bytes expected and not copied yet
  std::uint32_t phase = 0;     // complete ones, modulo 2
  std::vector<Bulk> flying;    // of this phase
  std::vector<Bulk> landing;   // of the one before, until somebody waits for it
  std::vector<int> waiting;
};

class Machine {
 public:
  // ---- what intrinsics ask for
  Thread& self() { return *threads_[static_cast<std::size_t>(current_)]; }
  int thread() const { return current_; }
  int threads() const { return count_; }
  Dim block() const { return block_; }
  Dim grid() const { return grid_; }
  char* shared() const { return shared_; }

  /// Ends the kernel with a message; never returns to the fiber that calls it.
  [[noreturn]] __attribute__((format(printf, 2, 3))) void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    error_ = block_name() + ", thread " + std::to_string(current_) + ": " + text;
    switch_context(self().context, main_);
    std::abort();
  }

  [[noreturn]] void fail_at(const char* op, Where where, const char* what) {
    fail("%s at %s:%d: %s", op, where.file, where.line, what);
  }

  /// `bytes` at `at` must lie in dynamic shared memory and be aligned.
  void check_shared(const char* op, Where where, const void* at, std::size_t bytes,
                    std::size_t align) {
    auto* byte = static_cast<const char*>(at);
    if (byte < shared_ || byte + bytes > shared_ + shared_bytes_) {
      fail("%s at %s:%d: address is %td bytes from the start of %zu bytes of shared memory", op,
           where.file, where.line, byte - shared_, shared_bytes_);
    }
    if (reinterpret_cast<std::uintptr_t>(at) % align != 0) {
      fail("%s at %s:%d: shared address is not %zu-byte aligned", op, where.file, where.line,
           align);
    }
  }

  /// Meets the other lanes of `mask`; the last to arrive runs `all` over the lanes' arguments.
  template <typename Lane>
  void gather(const char* op, Where where, std::uint32_t mask, Lane& mine,
              void (*all)(Lane* const*, std::uint32_t)) {
    const int warp = current_ / kWarp;
    const std::uint32_t bit = 1u << (current_ % kWarp);
    if ((mask & bit) == 0) fail_at(op, where, "the mask does not name the thread itself");
    if ((mask & exited_[static_cast<std::size_t>(warp)]) != 0) {
      fail_at(op, where, "divergent: a lane named by the mask has left the kernel");
    }
    auto& open = gatherings_[static_cast<std::size_t>(warp)];
    auto it = std::find_if(open.begin(), open.end(), [&](auto& g) { return g.mask == mask; });
    if (it == open.end()) {
      open.push_back({mask, 0, op, where, {}});
      it = open.end() - 1;
    } else if (std::strcmp(it->op, op) != 0 || !it->where.same(where)) {
      fail("divergent: %s at %s:%d, but other lanes of the warp are at %s, %s:%d", op, where.file,
           where.line, it->op, it->where.file, it->where.line);
    }
    it->lanes[current_ % kWarp] = &mine;
    it->arrived |= bit;
    if (it->arrived != mask) {
      suspend(op, where);
      return;
    }
    Gathering done = *it;
    open.erase(it);
    all(reinterpret_cast<Lane* const*>(done.lanes), mask);
    for (int lane = 0; lane < kWarp; ++lane) {
      const int index = warp * kWarp + lane;
      if ((mask >> lane & 1) != 0 && index != current_) wake(index);
    }
  }

  /// bar.sync of `wanted` threads, or bar.arrive if the thread does not wait; `id` 0 is the whole
  /// block's and must be one line for all.
  void barrier(const char* op, Where where, int id, int wanted, bool waits = true) {
    if (id < 0 || id > 15 || wanted <= 0 || wanted % kWarp != 0 || wanted > count_) {
      fail("%s at %s:%d: barrier %d of %d threads", op, where.file, where.line, id, wanted);
    }
    Barrier& barrier = barriers_[id];
    if (barrier.arrived.empty()) {
      barrier.wanted = wanted;
      barrier.where = where;
    } else if (barrier.wanted != wanted) {
      fail_at(op, where, "divergent: another thread came to this barrier with another count");
    } else if (id == 0 && !barrier.where.same(where)) {
      fail("divergent: %s at %s:%d, but other threads are at the barrier of %s:%d", op, where.file,
           where.line, barrier.where.file, barrier.where.line);
    }
    if (id == 0 && exited_count_ != 0) {
      fail_at(op, where, "divergent: a thread of the block has left the kernel");
    }
    barrier.arrived.push_back(current_);
    if (static_cast<int>(barrier.arrived.size()) < wanted) {
      if (!waits) return;
      barrier.waiting.push_back(current_);
      suspend(op, where);
      return;
    }
    std::vector<int> met, waiting;
    met.swap(barrier.arrived);
    waiting.swap(barrier.waiting);
    std::vector<int> of_warp(static_cast<std::size_t>(count_ / kWarp), 0);
    for (int index : met) ++of_warp[static_cast<std::size_t>(index / kWarp)];
    for (int arrived : of_warp) {
      if (arrived != 0 && arrived != kWarp) fail_at(op, where, "divergent: part of a warp");
    }
    for (int index : waiting) wake(index);
  }

  /// A barrier of the block that tells whether one of its threads brought `value`.
  bool barrier_or(const char* op, Where where, bool value) {
    brought_ |= value;
    barrier(op, where, 0, count_);
    const bool any = brought_;
    if (++readers_ == count_) brought_ = false, readers_ = 0;
    barrier(op, where, 0, count_);  // none brings the next before all have read this
    return any;
  }

  void init_mbarrier(Where where, const void* at, int count) {
    check_shared("mbarrier_init", where, at, 8, 8);
    for (const Mbarrier& other : mbarriers_) {
      if (other.at == at) fail_at("mbarrier_init", where, "there is one already");
    }
    mbarriers_.emplace_back();
    mbarriers_.back().at = at;
    mbarriers_.back().count = count;
  }

  void arrive(Where where, const void* at, int bytes) {
    Mbarrier& barrier = mbarrier_at("mbarrier_arrive_expect", where, at);
    ++barrier.arrived;
    barrier.missing += bytes;
    complete(barrier);
  }

  /// The source is read now, the destination poisoned now and written at the wait.
  void copy_bulk(Where where, void* to, const void* from, int bytes, const void* at) {
    Mbarrier& barrier = mbarrier_at("bulk_copy", where, at);
    check_shared("bulk_copy", where, to, static_cast<std::size_t>(bytes), 16);
    if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
      fail_at("bulk_copy", where, "global address or size is not a multiple of 16 bytes");
    }
    if (!barrier.landing.empty()) {
      fail_at("bulk_copy", where, "nobody has waited for the copies of the phase before");
    }
    auto* source = static_cast<const char*>(from);
    barrier.flying.push_back({static_cast<char*>(to), {source, source + bytes}});
    poison(static_cast<char*>(to), static_cast<std::size_t>(bytes));
    barrier.missing -= bytes;
    complete(barrier);
  }

  /// Until the phase of this parity is complete.
  void wait_mbarrier(Where where, const void* at, std::uint32_t parity) {
    while (mbarrier_at("mbarrier_wait", where, at).phase == parity) {
      mbarrier_at("mbarrier_wait", where, at).waiting.push_back(current_);
      suspend("mbarrier_wait", where);
    }
    Mbarrier& barrier = mbarrier_at("mbarrier_wait", where, at);
    for (const Mbarrier::Bulk& copy : barrier.landing) {
      std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    }
    barrier.landing.clear();
  }

  // ---- what a launch asks for

  /// Runs every block; 0, or an error code with the reason in `error()`.
  int run(Dim grid, int threads, std::size_t shared_bytes, const std::function<void()>& body) {
    std::lock_guard<std::mutex> one_launch(launch_mutex_);
    error_.clear();
    if (threads <= 0 || threads > 1024 || threads % kWarp != 0) {
      return refuse("blocks must be whole warps, at most 1024 threads");
    }
    grid_ = grid;
    count_ = threads;
    body_ = &body;
    while (threads_.size() < static_cast<std::size_t>(threads)) {
      threads_.push_back(std::make_unique<Thread>());
    }
    map_shared(shared_bytes);
    std::vector<std::uint64_t> order(static_cast<std::uint64_t>(grid.x) * grid.y);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    Random dice{seed_ ^ 0x5851F42D4C957F2Du};
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[dice.below(static_cast<std::uint32_t>(i))]);
    }
    struct sigaction before[2];
    stack_t stack_before;
    catch_faults(before, stack_before);
    for (std::uint64_t index : order) {
      block_ = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x)};
      run_block(index);
      if (!error_.empty()) break;
    }
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    sigaltstack(&stack_before, nullptr);
    unmap_shared();
    return error_.empty() ? 0 : kLaunchFailure;
  }

  /// A launch that cannot be made.
  int refuse(const char* reason) {
    error_ = reason;
    return kInvalidValue;
  }

  /// Eight addresses of 16 bytes that ldmatrix reads in one pass where they lie in all 32 banks.
  void count_matrix(const void* const (&rows)[8]) {
    int in_bank[8] = {}, passes = 0;
    for (const void* row : rows) {
      passes = std::max(passes, ++in_bank[reinterpret_cast<std::uintptr_t>(row) / 16 % 8]);
    }
    bank_conflicts_ += static_cast<std::uint64_t>(passes - 1);
  }
  /// Passes of ldmatrix beyond the first, since the library was loaded.
  std::uint64_t bank_conflicts() const { return bank_conflicts_; }

  const std::string& error() const { return error_; }
  void seed(std::uint64_t value) { seed_ = value; }

  void raise_shared_limit(const void* kernel, std::size_t bytes) {
    if (!may_use_shared(kernel, bytes)) raised_.emplace_back(kernel, bytes);
  }
  bool may_use_shared(const void* kernel, std::size_t bytes) const {
    return bytes <= kSharedDefault ||
           std::any_of(raised_.begin(), raised_.end(),
                       [&](auto& entry) { return entry.first == kernel && bytes <= entry.second; });
  }

 private:
  Mbarrier& mbarrier_at(const char* op, Where where, const void* at) {
    for (Mbarrier& barrier : mbarriers_) {
      if (barrier.at == at) return barrier;
    }
    fail_at(op, where, "there is no mbarrier at this address");
  }

  void complete(Mbarrier& barrier) {
    if (barrier.arrived != barrier.count || barrier.missing != 0) return;
    barrier.arrived = 0;
    barrier.phase ^= 1;
    barrier.landing.swap(barrier.flying);
    std::vector<int> waiting;
    waiting.swap(barrier.waiting);
    for (int index : waiting) wake(index);
  }

  void run_block(std::uint64_t index) {
    dice_ = Random{seed_ + index * 0xD1342543DE82EF95u};
    dice_.next();
    one_warp_ahead_ = (dice_.next() & 1) != 0;
    poison(shared_ - kRedZone, kRedZone + shared_room_);
    gatherings_.assign(static_cast<std::size_t>(count_ / kWarp), {});
    exited_.assign(static_cast<std::size_t>(count_ / kWarp), 0);
    for (Barrier& barrier : barriers_) barrier.arrived.clear(), barrier.waiting.clear();
    mbarriers_.clear();
    brought_ = false, readers_ = 0;
    exited_count_ = 0;
    ready_.clear();
    for (int i = 0; i < count_; ++i) {
      Thread& thread = *threads_[static_cast<std::size_t>(i)];
      prepare(thread.context, *thread.stack, &Machine::fiber_main);
      thread.index = i;
      thread.waiting = thread.exited = false;
      thread.copies.clear();
      thread.groups = 0;
      ready_.push_back(i);
    }
    current_ = pick();
    switch_context(main_, self().context);
    if (error_.empty() && exited_count_ != count_) report_deadlock();
    for (const Mbarrier& barrier : mbarriers_) {
      if (error_.empty() && !(barrier.flying.empty() && barrier.landing.empty())) {
        error_ = block_name() + ": ended with a bulk copy that nobody waited for";
      }
    }
    if (error_.empty() && !(is_poison(shared_ - kRedZone, kRedZone) &&
                            is_poison(shared_ + shared_bytes_, shared_room_ - shared_bytes_))) {
      error_ = block_name() + ": a thread wrote just outside of the shared memory";
    }
  }

  static void fiber_main();

  void leave() {
    Thread& me = self();
    if (!me.copies.empty()) fail("left the kernel with a cp.async that it never waited for");
    const auto warp = static_cast<std::size_t>(current_ / kWarp);
    for (const Gathering& open : gatherings_[warp]) {
      if ((open.mask >> (current_ % kWarp) & 1) != 0) {
        fail("divergent: left the kernel, but other lanes of the warp wait for it in %s at %s:%d",
             open.op, open.where.file, open.where.line);
      }
    }
    if (!barriers_[0].arrived.empty()) {
      fail("divergent: left the kernel, but other threads wait at the barrier of %s:%d",
           barriers_[0].where.file, barriers_[0].where.line);
    }
    me.exited = true;
    exited_[warp] |= 1u << (current_ % kWarp);
    ++exited_count_;
    yield();
  }

  void suspend(const char* op, Where where) {
    Thread& me = self();
    me.op = op;
    me.where = where;
    me.waiting = true;
    yield();
  }

  void wake(int index) {
    threads_[static_cast<std::size_t>(index)]->waiting = false;
    ready_.push_back(index);
  }

  void yield() {
    Thread& me = self();
    if (ready_.empty()) {
      switch_context(me.context, main_);
      return;
    }
    current_ = pick();
    switch_context(me.context, self().context);
  }

  /// Half of the blocks interleave all threads at random; in the others the warp that woke last
  /// goes on, so one warp runs as far ahead as barriers let it.
  int pick() {
    const auto size = static_cast<std::uint32_t>(ready_.size());
    const std::uint32_t window = one_warp_ahead_ ? std::min(size, std::uint32_t{kWarp}) : size;
    const std::size_t at = size - 1 - dice_.below(window);
    const int index = ready_[at];
    ready_[at] = ready_.back();
    ready_.pop_back();
    return index;
  }

  std::string block_name() const {
    return "block (" + std::to_string(block_.x) + ", " + std::to_string(block_.y) + ")";
  }

  void report_deadlock() {
    error_ = block_name() + ": deadlock:";
    const Thread* last = nullptr;
    int named = 0;
    for (int i = 0; i < count_ && named < 4; ++i) {
      const Thread& thread = *threads_[static_cast<std::size_t>(i)];
      if (!thread.waiting || (last != nullptr && last->where.same(thread.where))) continue;
      error_ += " thread " + std::to_string(i) + " waits in " + thread.op + " at " +
                thread.where.file + ":" + std::to_string(thread.where.line) + ";";
      last = &thread;
      ++named;
    }
  }

  // Shared memory ends at unreadable pages (but for the rest up to 128 bytes, which is checked
  // after each block) and begins behind a red zone, checked too, and more unreadable pages.
  static constexpr std::size_t kRedZone = 128;
  static constexpr std::size_t kGuard = std::size_t{16} << 20;

  void map_shared(std::size_t bytes) {
    shared_bytes_ = bytes;
    shared_room_ = (bytes + 127) / 128 * 128;
    const std::size_t usable = (shared_room_ + kRedZone + kPageBytes - 1) / kPageBytes * kPageBytes;
    mapped_bytes_ = kGuard + usable + kGuard;
    void* at = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (at == MAP_FAILED) std::abort();
    mapped_ = static_cast<char*>(at);
    if (mprotect(mapped_ + kGuard, usable, PROT_READ | PROT_WRITE) != 0) std::abort();
    shared_ = mapped_ + kGuard + usable - shared_room_;
  }

  void unmap_shared() {
    munmap(mapped_, mapped_bytes_);
    shared_ = nullptr;
  }

  // A load or store outside of all memory ends the kernel, not the process.
  void catch_faults(struct sigaction (&before)[2], stack_t& stack_before) {
    struct sigaction action = {};
    action.sa_sigaction = &Machine::on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t alternate = {};
    alternate.ss_sp = fault_stack_.low();
    alternate.ss_size = kStackBytes;
    sigaltstack(&alternate, &stack_before);
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
  }

  static void on_fault(int signal, siginfo_t* info, void* context);
  static void after_fault();

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<int> ready_;
  std::vector<std::vector<Gathering>> gatherings_;  // per warp
  std::vector<std::uint32_t> exited_;               // per warp, a bit per lane
  Barrier barriers_[16];
  std::vector<Mbarrier> mbarriers_;  // of the block
  bool brought_ = false;             // to `barrier_or`, since it was read last
  int readers_ = 0;
  Context main_;
  Stack fault_stack_;
  void* fault_address_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  Dim grid_, block_;
  int count_ = 0, current_ = 0, exited_count_ = 0;
  bool one_warp_ahead_ = false;
  Random dice_{0};
  std::uint64_t seed_ = 0;
  char* mapped_ = nullptr;
  char* shared_ = nullptr;
  std::size_t mapped_bytes_ = 0, shared_bytes_ = 0, shared_room_ = 0;
  std::uint64_t bank_conflicts_ = 0;
  std::string error_;
  std::vector<std::pair<const void*, std::size_t>> raised_;
  std::mutex launch_mutex_;
};

// Never destroyed: a fault in another library at exit must not find a dead machine.
inline Machine& machine = *new Machine;

inline void Machine::fiber_main() {
  (*machine.body_)();
  machine.leave();
  std::abort();
}

inline void Machine::after_fault() {
  machine.fail("memory fault at %p, %td bytes from the start of %zu bytes of shared memory",
               machine.fault_address_,
               static_cast<char*>(machine.fault_address_) - machine.shared_,
               machine.shared_bytes_);
}

inline void Machine::on_fault(int signal, siginfo_t* info, void* context) {
  machine.fault_address_ = info->si_addr;
#if defined(__x86_64__) && defined(__linux__)
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const char* low = machine.self().stack->low() - kPageBytes;
  const auto at = reinterpret_cast<const char*>(registers[REG_RSP]);
  if (at >= low && at <= machine.self().stack->top()) {
    registers[REG_RSP] = reinterpret_cast<greg_t>(machine.self().stack->top()) - 8;
    registers[REG_RIP] = reinterpret_cast<greg_t>(&Machine::after_fault);
    return;
  }
#else
  (void)context;
#endif
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);  // not a kernel's: let it end the process
}

}  // namespace overstory::sim

#pragma GCC visibility pop
