#include "ops/cuda/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/buffer.h"
#include "core/check.h"
#include "ops/cuda/device_memory.h"

namespace replayssm::testing {
namespace {

TEST(CudaDevice, SaysWhyItCannotBeUsed) {
  if (!has_device()) {
    EXPECT_THAT(cuda::device_obstacle(), ::testing::HasSubstr("no "));
  } else {
    EXPECT_EQ(cuda::device_obstacle(), "");
  }
}

TEST(CudaDevice, MemoryIsZeroedAndZeroesPieces) {
  REQUIRE_DEVICE();
  const cuda::Stream stream;
  cuda::DeviceMemory memory(stream);
  constexpr int64_t kBytes = 4096;
  const Buffer buffer(kBytes, memory);
  std::vector<std::byte> host(kBytes, std::byte{7});
  memory.read(host.data(), buffer.as<>(), kBytes);
  EXPECT_EQ(host, std::vector<std::byte>(kBytes));
  const std::vector<std::byte> ones(kBytes, std::byte{0xff});
  memory.write(buffer.as<>(), ones.data(), kBytes);
  memory.zero(buffer.as<>() + 100, 24, 1000, 3);
  memory.read(host.data(), buffer.as<>(), kBytes);
  for (int64_t i = 0; i < kBytes; ++i) {
    const int64_t in_piece = i - 100 - (i - 100) / 1000 * 1000;
    const bool zeroed = i >= 100 && i < 100 + 3 * 1000 && in_piece < 24;
    ASSERT_EQ(host[i], zeroed ? std::byte{0} : std::byte{0xff}) << i;
  }
}

TEST(CudaDevice, RandomWeightsAreThoseOfTheHost) {
  REQUIRE_DEVICE();
  const cuda::Stream stream;
  cuda::DeviceMemory memory(stream);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const int64_t element = dtype_bytes(dtype);
    for (const uint64_t first : {uint64_t{0}, uint64_t{7}, (uint64_t{1} << 63) - 5}) {
      for (const int64_t count : {1, 3, 4, 1000, 4099}) {
        const auto bytes = static_cast<size_t>((count + 2) * element);
        std::vector<std::byte> want(bytes), got(bytes);
        host_memory().write_random(want.data() + element, dtype, first, count);
        const Buffer there(static_cast<int64_t>(bytes), memory);
        memory.write_random(there.as<>() + element, dtype, first, count);
        memory.read(got.data(), there.as<>(), static_cast<int64_t>(bytes));
        EXPECT_EQ(got, want) << dtype_name(dtype) << " from " << first << ", " << count;
      }
    }
  }
}

TEST(CudaDevice, CountsWhatIsGivenBackAndRefusesTooMuch) {
  REQUIRE_DEVICE();
  const cuda::Stream stream;
  cuda::DeviceMemory memory(stream);
  {
    const Buffer buffer(1 << 20, memory);
  }
  EXPECT_EQ(memory.releases(), 1);
  const MemoryCapacity capacity = memory.capacity();
  EXPECT_GT(capacity.free, 0);
  EXPECT_LE(capacity.free, capacity.total);
  EXPECT_THAT([&] { Buffer(2 * capacity.total, memory); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("out of device memory")));
  const Buffer after(1 << 20, memory);  // a refusal leaves the device usable
  stream.synchronize();
}

}  // namespace
}  // namespace replayssm::testing
