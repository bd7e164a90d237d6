// The memory and the streams of the stand-in device. See device.py for what it is.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <ATen/core/Tensor.h>

namespace standin {

// A moment of a stream, which is reached once.
class Marker {
 public:
  void reach();
  void wait();
  bool reached();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

enum class Kind { kernel, copy, order };

constexpr at::DeviceType kDevice = at::DeviceType::PrivateUse1;

// Queues work on the calling thread's current stream. It is run later, by that stream's own thread.
void submit(Kind kind, std::function<void()> work);
// Waits until the calling thread's current stream has done all that was queued. Raises what failed there.
void synchronize();
// Raises what failed on any stream since the last call.
void raise_failure();

at::Allocator* allocator();
// Where the device's own threads find what the host knows at an address that it may not touch.
void* inside(const void* address);
// Whether all of this host memory is pinned.
bool is_pinned(const void* address, size_t bytes);

}  // namespace standin
