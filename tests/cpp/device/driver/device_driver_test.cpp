// What users are told about the driver and the kernels, with drivers of the test's own.

#include <cstdio>
#include <cstring>

#include "device/driver/driver.h"
#include "device/kernels/kernels.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using device::Driver;

Driver working_driver() {
  Driver driver{};
  driver.init = [](unsigned int) { return 0; };
  driver.driver_version = [](int* version) { return *version = 13000, 0; };
  driver.device_count = [](int* count) { return *count = 2, 0; };
  driver.device_get = [](int* one, int ordinal) { return *one = ordinal, 0; };
  driver.device_name = [](char* name, int length, int one) {
    return std::snprintf(name, static_cast<std::size_t>(length), "Test %d", one), 0;
  };
  driver.device_attribute = [](int* value, int attribute, int one) {
    if (one == 1) return 101;
    return *value = attribute == 75 ? 9 : 0, 0;
  };
  driver.device_can_access_peer = [](int* can, int one, int other) {
    return *can = one + other != 3 ? 1 : 0, 0;
  };
  driver.device_pair_attribute = [](int* value, int attribute, int one, int other) {
    return *value = attribute == 3 && one + other < 2 ? 1 : 0, 0;
  };
  driver.error_text = [](int error, const char** text) {
    *text = "no CUDA-capable device is detected";
    return error == 100 ? 0 : 1;
  };
  return driver;
}

TEST(devices_are_listed) {
  const std::string text = device::driver_summary(working_driver());
  CHECK(text == "driver 13.0, 2 devices: 0 Test 0 (sm_90), 1 unknown; 0-1 over NVLink", "%s",
        text.c_str());
}

TEST(links_are_told) {
  Driver driver = working_driver();
  driver.device_count = [](int* count) { return *count = 3, 0; };
  std::string text = device::driver_summary(driver);
  CHECK(text.find("; 1-2 by way of the host; 0-1 over NVLink; 0-2 over PCIe") != std::string::npos,
        "%s", text.c_str());
  driver.device_pair_attribute = [](int* value, int, int, int) { return *value = 1, 0; };
  driver.device_can_access_peer = [](int* can, int, int) { return *can = 1, 0; };
  text = device::driver_summary(driver);
  CHECK(text.ends_with("; all pairs over NVLink"), "%s", text.c_str());
  driver.device_count = [](int* count) { return *count = 1, 0; };
  text = device::driver_summary(driver);
  CHECK(text == "driver 13.0, 1 device: 0 Test 0 (sm_90)", "%s", text.c_str());
}

TEST(a_driver_that_fails_says_why) {
  Driver driver = working_driver();
  driver.init = [](unsigned int) { return 100; };
  std::string text = device::driver_summary(driver);
  CHECK(text == "of no use: cuInit gives error 100 (no CUDA-capable device is detected)", "%s",
        text.c_str());
  driver.init = [](unsigned int) { return 3; };
  text = device::driver_summary(driver);
  CHECK(text == "of no use: cuInit gives error 3 (unknown error)", "%s", text.c_str());
}

// Whether this machine has a driver or not.
TEST(the_machine_is_described_in_words) {
  std::string why;
  const bool is_there = device::driver(&why) != nullptr;
  const std::string text = device::driver_summary();
  CHECK(!text.empty() && (is_there || text == why), "%s", text.c_str());
  CHECK(is_there || why.find("libcuda.so.1") != std::string::npos, "%s", why.c_str());
}

TEST(the_module_is_a_fat_binary_or_nothing) {
  const auto image = device::module_image();
  CHECK(!device::module_summary().empty(), "no summary");
  if (image.empty()) return;
  // The first four bytes of what fatbinary writes.
  constexpr unsigned char kMagic[] = {0x50, 0xed, 0x55, 0xba};
  CHECK(image.size() > 100'000 && std::memcmp(image.data(), kMagic, sizeof(kMagic)) == 0,
        "%zu bytes", image.size());
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
