#include "model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>

#include "core/check.h"
#include "model/folders.h"

namespace replayssm::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return '"' + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + shape +
         R"(],"data_offsets":[)" + offsets + "]}";
}

std::string error_for(const std::string& file) {
  return error_of([&] {
    parse_safetensors({reinterpret_cast<const std::byte*>(file.data()), file.size()}, "m.st");
  });
}

TEST(SafetensorsHeader, Refused) {
  const std::string data(16, 'x'), a = entry("a", "F32", "2", "0,8");
  const std::pair<std::string, std::string> cases[] = {
      {"", "truncated: expected at least 8 bytes, got 0"},
      {std::string(7, '\0'), "truncated"},
      {std::string(8, '\0'), "malformed JSON"},
      {std::string(8, '\xff'), "header length: expected at most 0, got 18446744073709551615"},
      {std::string("\x03\0\0\0\0\0\0\0{}", 10), "header length: expected at most 2, got 3"},
      {safetensors_bytes("[]", data), "expected a JSON object"},
      {safetensors_bytes("{" + a, data), "malformed JSON"},
      {safetensors_bytes("{" + a + "," + a + "}", data), "key \"a\" occurs twice"},
      {safetensors_bytes("{\"a\":3}", data), "tensor \"a\": expected an object, got 3"},
      {safetensors_bytes("{\"a\":{}}", data), "tensor \"a\": missing dtype"},
      {safetensors_bytes(R"({"a":{"dtype":"F32"}})", data), "missing shape"},
      {safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2]}})", data), "missing data_offsets"},
      {safetensors_bytes(R"({"a":{"dtype":"F32","extra":1}})", data), "unknown key \"extra\""},
      {safetensors_bytes("{" + entry("a", "F31", "2", "0,8") + "}", data), "unknown dtype \"F31\""},
      {safetensors_bytes(R"({"a":{"dtype":1,"shape":[],"data_offsets":[0,4]}})", data), "dtype: "},
      {safetensors_bytes("{" + entry("a", "F32", "-2", "0,8") + "}", data), "expected a number >="},
      {safetensors_bytes("{" + entry("a", "F32", "2.0", "0,8") + "}", data), "got 2.0"},
      {safetensors_bytes("{" + entry("a", "F32", "1,1,1,1,1,1,1,1,2", "0,8") + "}", data),
       "at most 8 sizes"},
      {safetensors_bytes("{" + entry("a", "F32", "2", "0") + "}", data), "expected two numbers"},
      {safetensors_bytes("{" + entry("a", "F32", "2", "8,0") + "}", data), "lie outside"},
      {safetensors_bytes("{" + entry("a", "F32", "2", "12,20") + "}", data),
       "data_offsets [12, 20] lie outside the 16 bytes"},
      {safetensors_bytes("{" + entry("a", "F32", "2", "0,18446744073709551615") + "}", data),
       "lie outside"},
      {safetensors_bytes("{" + entry("a", "F32", "3", "0,8") + "}", data),
       "expected 12 bytes for F32 [3], got data_offsets [0, 8]"},
      {safetensors_bytes("{" + entry("a", "F32", "4611686018427387904,4", "0,0") + "}", data),
       "overflows"},
      {safetensors_bytes("{" + entry("a", "F32", "18446744073709551615", "0,8") + "}", data),
       "overflows"},
      {safetensors_bytes("{" + entry("a", "F4", "3", "0,1") + "}", data), "whole byte"},
      {safetensors_bytes("{" + a + "," + entry("b", "BF16", "2", "6,10") + "}", data),
       "tensors \"a\" and \"b\" overlap"},
      {safetensors_bytes("{\"__metadata__\":[]}", data), "__metadata__"},
      {safetensors_bytes("{\"__metadata__\":{\"a\":1}}", data), "__metadata__"},
  };
  for (const auto& [file, words] : cases) {
    const std::string error = error_for(file);
    EXPECT_THAT(error, HasSubstr(words));
    EXPECT_THAT(error, HasSubstr("m.st: "));
    EXPECT_THAT(error, Not(HasSubstr("\n")));
  }
}

TEST(SafetensorsHeader, Accepted) {
  const std::string data(16, 'x');
  for (const std::string& header : {
           std::string("{}"),
           "{" + entry("a", "F32", "2", "0,8") + "," + entry("b", "F32", "2", "8,16") + "}   ",
           "{" + entry("b", "I64", "1", "8,16") + "," + entry("a", "F32", "", "0,4") + "}",
           "{" + entry("a", "F4", "4", "3,5") + ",\"__metadata__\":{\"format\":\"pt\"}}",
           "{" + entry("a", "F32", "0,18446744073709551", "16,16") + "}",
       }) {
    EXPECT_EQ(error_for(safetensors_bytes(header, data)), "") << header;
  }
}

class ShardedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    write_safetensors(folder_ / "m1.safetensors", {{"a", float_tensor({2}, {1, 2})}});
    write_safetensors(folder_ / "m2.safetensors", {{"b", float_tensor({1}, {3})}});
    index_["weight_map"] = {{"a", "m1.safetensors"}, {"b", "m2.safetensors"}};
  }

  std::string error() {
    write_file(folder_ / "model.safetensors.index.json", index_.dump());
    return error_of([&] { Checkpoint checkpoint(folder_.path()); });
  }

  TempFolder folder_;
  json index_;
};

TEST_F(ShardedCheckpoint, Loads) {
  EXPECT_EQ(error(), "");
  const Checkpoint checkpoint(folder_.path());
  EXPECT_EQ(checkpoint.entries().size(), 2);
  const TensorEntry* a = checkpoint.find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(checkpoint.view(*a, 0, {2}).to_floats(), (std::vector<float>{1, 2}));
  EXPECT_EQ(checkpoint.view(*a, 1, {1}).to_floats(), (std::vector<float>{2}));
  EXPECT_EQ(checkpoint.find("c"), nullptr);
}

TEST_F(ShardedCheckpoint, IndexThatDisagrees) {
  const json good = index_;
  const auto with = [&](const std::string& name, const json& shard) {
    index_ = good;
    index_["weight_map"][name] = shard;
    return error();
  };
  EXPECT_THAT(with("a", "m2.safetensors"), HasSubstr("index.json: tensor \"a\" is not in shard"));
  EXPECT_THAT(with("c", "m2.safetensors"), HasSubstr("tensor \"c\" is not in shard"));
  EXPECT_THAT(with("c", "m3.safetensors"), HasSubstr("missing shard \"m3.safetensors\""));
  for (const json& shard : {json("../m1.safetensors"), json("/m1.safetensors"), json("m1.bin"),
                            json(""), json(1), json("sub/m1.safetensors")}) {
    EXPECT_THAT(with("a", shard), HasSubstr("expected the name of a .safetensors file"));
  }
  index_ = good;
  index_["weight_map"].erase("b");
  index_["weight_map"]["c"] = "m2.safetensors";
  EXPECT_THAT(error(), HasSubstr("disagrees with \"m2.safetensors\", which holds tensor \"b\""));
  index_ = json::object();
  EXPECT_THAT(error(), HasSubstr("weight_map: expected an object, got nothing"));
  index_["weight_map"] = json::object();
  EXPECT_THAT(error(), HasSubstr("weight_map is empty"));
  index_ = good;
  write_safetensors(folder_ / "model.safetensors", {{"a", float_tensor({2}, {1, 2})}});
  EXPECT_THAT(error(), HasSubstr("does not name model.safetensors"));
}

TEST_F(ShardedCheckpoint, SameTensorInTwoShards) {
  write_safetensors(folder_ / "m2.safetensors",
                    {{"a", float_tensor({1}, {3})}, {"b", float_tensor({1}, {3})}});
  EXPECT_THAT(error(), HasSubstr("disagrees with"));
}

TEST(Checkpoint, WithoutSafetensors) {
  const TempFolder folder;
  const auto open = [&] { Checkpoint checkpoint(folder.path()); };
  EXPECT_THAT(error_of(open), HasSubstr("expected model.safetensors"));
  write_file(folder / "pytorch_model.bin", "x");
  EXPECT_THAT(error_of(open), HasSubstr("pytorch_model.bin only; expected model.safetensors"));
  std::filesystem::create_directory(folder / "model.safetensors");
  EXPECT_THAT(error_of(open), HasSubstr("not a regular file"));
  std::filesystem::remove(folder / "model.safetensors");
  ASSERT_EQ(mkfifo((folder / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(error_of(open), HasSubstr("not a regular file"));
}

int64_t resident_file_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == "RssFile:" && status >> kib) return kib;
  }
  return -1;
}

// Reading a file tensor by tensor holds no more of it than one tensor.
TEST(Checkpoint, DroppedTensorsReleaseTheirPages) {
  constexpr int64_t kTensors = 16, kElements = 1 << 20;
  const TempFolder folder;
  StoredTensors tensors;
  for (int64_t i = 0; i < kTensors; ++i) {
    tensors["t" + std::to_string(i)] =
        float_tensor({kElements}, std::vector<float>(kElements, static_cast<float>(i)));
  }
  write_safetensors(folder / "model.safetensors", tensors);
  const Checkpoint checkpoint(folder.path());
  const int64_t before = resident_file_kib();
  ASSERT_GT(before, 0);
  int64_t most = 0;
  for (int64_t i = 0; i < kTensors; ++i) {
    const TensorEntry* found = checkpoint.find("t" + std::to_string(i));
    const Tensor tensor = checkpoint.view(*found, 0, {kElements});
    EXPECT_EQ(tensor.to_floats()[kElements - 1], static_cast<float>(i));
    most = std::max(most, resident_file_kib() - before);
  }
  constexpr int64_t kTensorKib = kElements * 4 / 1024;
  EXPECT_GE(most, kTensorKib);      // the measurement sees the pages
  EXPECT_LE(most, 3 * kTensorKib);  // one tensor, and what the kernel maps around it
}

TEST(Checkpoint, TensorsOutliveTheCheckpoint) {
  const TempFolder folder;
  write_safetensors(folder / "model.safetensors", {{"a", float_tensor({2}, {1, 2})}});
  Tensor tensor;
  {
    const Checkpoint checkpoint(folder.path());
    tensor = checkpoint.view(*checkpoint.find("a"), 0, {2});
  }
  EXPECT_EQ(tensor.to_floats(), (std::vector<float>{1, 2}));
}

}  // namespace
}  // namespace replayssm::testing
