// What the worker calls beside flash_attn itself: the device, and what a call came to.
#include <c10/core/Allocator.h>

#include <string>

#include "described_device.h"
#include "recorder.h"

namespace {

// flash_api.cpp tells by a pointer whether a tensor was given, and torch's own pointers on `meta` are null.
// Nothing reads or writes there.
struct FakeMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    return {reinterpret_cast<void*>(uintptr_t{1} << 40), c10::Device(c10::DeviceType::Meta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return [](void*) {}; }
  void copy_data(void*, void const*, size_t) const override {}
};

FakeMemory fake_memory;
std::string answer;

}  // namespace

extern "C" {

void attnsel_give_meta_tensors_addresses() {
  c10::SetAllocator(c10::DeviceType::Meta, &fake_memory, /*priority=*/255);
}

int attnsel_describe(int major, int minor, int sm_count) {
  try {
    attnsel::describe(major, minor, sm_count);
    return 0;
  } catch (std::exception const&) {
    return 1;
  }
}

void attnsel_forget() { attnsel::recorded() = {}; }

char const* attnsel_launches() { return (answer = attnsel::recorded().launches).c_str(); }

char const* attnsel_where() { return (answer = attnsel::recorded().where).c_str(); }

}  // extern "C"
