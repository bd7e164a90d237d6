// Streams, events, memory and pinned pages of the stand-in device.
#include "standin.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace standin {

void Marker::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  reached_ = true;
  changed_.notify_all();
}

void Marker::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Marker::reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

namespace {

std::mutex failure_mutex;
std::string failure;

void fail(const char* what) {
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (failure.empty()) failure = what;
}

std::atomic<int64_t> delay_seed{0}, most_delay_us{0};

// A stream: a thread that does what was queued, late and in order.
class Lane {
 public:
  explicit Lane(int64_t id) : id(id), random_(id) { std::thread([this] { run(); }).detach(); }

  void submit(Kind kind, std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({kind, std::move(work)});
    changed_.notify_one();
  }

  std::shared_ptr<Marker> mark() {
    auto marker = std::make_shared<Marker>();
    submit(Kind::order, [marker] { marker->reach(); });
    return marker;
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty();
  }

  const int64_t id;
  // Microseconds that each copy, and the first kernel after an order, waits besides.
  std::atomic<int64_t> slow_us{0};

 private:
  struct Task {
    Kind kind;
    std::function<void()> work;
  };

  void run() {
    at::set_num_threads(1);  // the same bits as the host's
    for (;;) {
      Task* task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = &tasks_.front();  // others only append
      }
      delay(task->kind);
      try {
        task->work();
      } catch (const c10::Error& error) {
        fail(error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(error.what());
      }
      std::function<void()> done;  // is let go without the lock
      std::lock_guard<std::mutex> lock(mutex_);
      done.swap(task->work);
      tasks_.pop_front();
    }
  }

  void delay(Kind kind) {
    if (seed_ != delay_seed) random_.seed((seed_ = delay_seed) * 1000 + id);
    int64_t us = 0;
    const int64_t one_in = kind == Kind::kernel ? 64 : 2;
    if (kind != Kind::order && most_delay_us > 0 && random_() % one_in == 0) us = random_() % most_delay_us;
    if (kind == Kind::copy || (kind == Kind::kernel && last_ == Kind::order)) us += slow_us;
    last_ = kind;
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::mt19937 random_;
  int64_t seed_ = 0;
  Kind last_ = Kind::order;
};

constexpr int64_t kLanes = 32;  // as CUDA's pool: more streams share them

std::mutex lanes_mutex;
auto& lanes = *new std::map<int64_t, Lane*>();

Lane& lane(int64_t id) {
  std::lock_guard<std::mutex> lock(lanes_mutex);
  auto& found = lanes[id];
  if (found == nullptr) found = new Lane(id);
  return *found;
}

int64_t next_lane() {
  static std::atomic<int64_t> count{0};
  return 1 + count++ % (kLanes - 1);
}

thread_local int64_t current_lane = 0;

void wait(const std::shared_ptr<Marker>& marker) {
  marker->wait();
  raise_failure();
}

void finish_all() {
  std::vector<std::shared_ptr<Marker>> markers;
  {
    std::lock_guard<std::mutex> lock(lanes_mutex);
    for (auto& [id, lane] : lanes) markers.push_back(lane->mark());
  }
  for (const auto& marker : markers) marker->wait();
}

void synchronize_all() {
  finish_all();
  raise_failure();
}

// Device memory is mapped twice: the host's addresses let nobody in, the device's threads use others.
constexpr size_t kMemory = size_t(16) << 30;
constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xff;  // a NaN of every floating type

struct Block {
  char* address;
  size_t size;
  Lane* lane;  // of its allocation
  std::set<Lane*> users;
};

struct Usage {
  int64_t current = 0, peak = 0;
  void add(int64_t bytes) { peak = std::max(peak, current += bytes); }
};

// A caching allocator with the rules of CUDA's: freed memory is the next allocation's of the same stream at once,
// unless record_stream said that other streams use it. Then it waits for what these have queued by then.
class Memory final : public at::Allocator {
 public:
  Memory() {
    const int file = memfd_create("standin", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kMemory) == 0, "standin: no memory for the device");
    outside_ = static_cast<char*>(mmap(nullptr, kMemory, PROT_NONE, MAP_SHARED, file, 0));
    inside_ = static_cast<char*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    TORCH_CHECK(outside_ != MAP_FAILED && inside_ != MAP_FAILED, "standin: no addresses for the device's memory");
    close(file);
  }

  at::DataPtr allocate(size_t bytes) override {
    const at::Device device(kDevice, 0);
    if (bytes == 0) return {nullptr, device};
    std::lock_guard<std::mutex> lock(mutex_);
    recycle_used();
    const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    Block* block = take(&lane(current_lane), size);
    live_[block->address] = block;
    allocated_.add(size);
    active_.add(size);
    return {block->address, block->address, raw_deleter(), device};
  }

  at::DeleterFnPtr raw_deleter() const override {
    return [](void* address) { static_cast<Memory*>(allocator())->free(address); };
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    submit(Kind::copy, [to = inside(to), from = inside(from), bytes] { std::memcpy(to, from, bytes); });
  }

  void record(const void* address, Lane* user) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(address);
    if (found != live_.end() && found->second->lane != user) found->second->users.insert(user);
  }

  void* inside(const void* address) const {
    return address == nullptr ? nullptr : inside_ + (static_cast<const char*>(address) - outside_);
  }

  std::vector<int64_t> usage() {
    std::lock_guard<std::mutex> lock(mutex_);
    recycle_used();
    return {allocated_.current, allocated_.peak, active_.current, active_.peak};
  }

  void reset_peaks() {
    std::lock_guard<std::mutex> lock(mutex_);
    recycle_used();
    allocated_.peak = allocated_.current;
    active_.peak = active_.current;
  }

 private:
  Block* take(Lane* lane, size_t size) {
    auto& cached = cached_[{lane, size}];
    if (!cached.empty()) {
      Block* block = cached.back();
      cached.pop_back();
      return block;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, used_ + size <= kMemory, "standin: out of memory");
    char* address = outside_ + used_;
    used_ += size;
    std::memset(inside(address), kPoison, size);
    return new Block{address, size, lane, {}};
  }

  void free(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(address);
    Block* block = found->second;
    live_.erase(found);
    allocated_.add(-int64_t(block->size));
    std::vector<std::shared_ptr<Marker>> markers;
    for (Lane* user : block->users) markers.push_back(user->mark());
    block->users.clear();
    if (markers.empty()) return recycle(block);
    used_elsewhere_.emplace_back(block, std::move(markers));
  }

  void recycle_used() {
    used_elsewhere_.remove_if([this](const auto& entry) {
      for (const auto& marker : entry.second)
        if (!marker->reached()) return false;
      recycle(entry.first);
      return true;
    });
  }

  void recycle(Block* block) {
    active_.add(-int64_t(block->size));
    block->lane->submit(Kind::order, [to = inside(block->address), size = block->size] {
      std::memset(to, kPoison, size);
    });
    cached_[{block->lane, block->size}].push_back(block);
  }

  std::mutex mutex_;
  char *outside_, *inside_;
  size_t used_ = 0;
  std::map<const void*, Block*> live_;
  std::map<std::pair<Lane*, size_t>, std::vector<Block*>> cached_;
  std::list<std::pair<Block*, std::vector<std::shared_ptr<Marker>>>> used_elsewhere_;
  Usage allocated_, active_;
};

Memory& memory() {
  static auto& memory = *new Memory();
  return memory;
}

// Pinned host memory, and how much of it there may be. Errors have CUDA's numbers.
struct {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
  size_t bytes = 0, limit = SIZE_MAX;
} pinned;

int64_t host_register(int64_t address, int64_t bytes) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto* begin = reinterpret_cast<const char*>(address);
  auto after = pinned.ranges.lower_bound(begin + bytes);
  if (after != pinned.ranges.begin() && std::prev(after)->first + std::prev(after)->second > begin) return 712;
  if (pinned.bytes + bytes > pinned.limit) return 2;
  pinned.ranges[begin] = bytes;
  pinned.bytes += bytes;
  return 0;
}

int64_t host_unregister(int64_t address) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  auto found = pinned.ranges.find(reinterpret_cast<const char*>(address));
  if (found == pinned.ranges.end()) return 713;
  pinned.bytes -= found->second;
  pinned.ranges.erase(found);
  return 0;
}

void limit_pinned(int64_t bytes) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.limit = bytes < 0 ? SIZE_MAX : bytes;
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  return pinned.bytes;
}

// Pinned memory of PyTorch's own, as of pin_memory(). Whoever frees it waits for the device, as with cudaFreeHost.
class PinnedMemory final : public at::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, at::kCPU};
    void* address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(host_register(int64_t(address), bytes) == 0, "standin: no more memory can be pinned");
    return {address, address, raw_deleter(), at::kCPU};
  }

  at::DeleterFnPtr raw_deleter() const override {
    return [](void* address) {
      finish_all();
      host_unregister(int64_t(address));
      std::free(address);
    };
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

using Event = std::shared_ptr<Marker>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return kDevice; }
  at::Device exchangeDevice(at::Device) const override { return getDevice(); }
  at::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  at::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, at::Device(kDevice, 0), id); }
  c10::Stream getStream(at::Device) const override { return stream(current_lane); }
  c10::Stream getDefaultStream(at::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(at::Device, bool) const override { return stream(next_lane()); }
  c10::Stream getNewStream(at::Device, int) const override { return stream(next_lane()); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(std::exchange(current_lane, to.id()));
  }
  bool queryStream(const c10::Stream& of) const override { return lane(of.id()).idle(); }
  void synchronizeStream(const c10::Stream& of) const override { wait(lane(of.id()).mark()); }
  void synchronizeDevice(at::DeviceIndex) const override { synchronize_all(); }

  void record(void** event, const c10::Stream& on, at::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event(lane(on.id()).mark());
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event == nullptr) return;
    lane(on.id()).submit(Kind::order, [marker = *static_cast<Event*>(event)] { marker->wait(); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<Event*>(event))->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, at::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    memory().record(data.get(), &lane(on.id()));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto& memory = *new PinnedMemory();
    return &memory;
  }
};

void set_delays(int64_t seed, int64_t most_us) {
  most_delay_us = most_us;
  delay_seed = seed;
}

void slow_down(int64_t stream, int64_t us) { lane(stream).slow_us = us; }

}  // namespace

void submit(Kind kind, std::function<void()> work) { lane(current_lane).submit(kind, std::move(work)); }

void synchronize() { wait(lane(current_lane).mark()); }

void raise_failure() {
  std::lock_guard<std::mutex> lock(failure_mutex);
  TORCH_CHECK(failure.empty(), "standin: work on a stream failed: ", std::exchange(failure, std::string()));
}

at::Allocator* allocator() { return &memory(); }

void* inside(const void* address) { return memory().inside(address); }

bool is_pinned(const void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto* begin = static_cast<const char*>(address);
  auto after = pinned.ranges.upper_bound(begin);
  if (after == pinned.ranges.begin()) return false;
  auto [first, size] = *std::prev(after);
  return begin + bytes <= first + size;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY(standin, m) {
  c10::SetAllocator(kDevice, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_delays(int seed, int most_us) -> ()", set_delays);
  m.def("slow_down(int stream, int us) -> ()", slow_down);
  m.def("host_register(int address, int bytes) -> int", host_register);
  m.def("host_unregister(int address) -> int", host_unregister);
  m.def("limit_pinned(int bytes) -> ()", limit_pinned);
  m.def("pinned_bytes() -> int", pinned_bytes);
  m.def("synchronize() -> ()", synchronize_all);
  m.def("usage() -> int[]", [] { return memory().usage(); });
  m.def("reset_peaks() -> ()", [] { memory().reset_peaks(); });
}

}  // namespace standin
