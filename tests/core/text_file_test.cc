#include "core/text_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "core/check.h"
#include "model/temporary_folder.h"

namespace replayssm {
namespace {

std::string error_of(const std::filesystem::path& path) {
  try {
    read_text_file(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(TextFile, IsReadWhole) {
  const TemporaryFolder folder;
  folder.write("a.json", std::string("{}\n\0x", 5));
  EXPECT_EQ(read_text_file(folder.path() / "a.json"), std::string("{}\n\0x", 5));
}

TEST(TextFile, MustBeARegularFileOfPlausibleSize) {
  const TemporaryFolder folder;
  EXPECT_NE(error_of(folder.path() / "no.json").find("no such file"), std::string::npos);
  EXPECT_NE(error_of(folder.path()).find("not a regular file"), std::string::npos);
  const auto pipe = folder.path() / "pipe.json";  // reading it would wait for a writer
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(error_of(pipe).find("not a regular file"), std::string::npos);
  folder.write("a.json", "{}");
  std::filesystem::resize_file(folder.path() / "a.json", uintmax_t{1} << 40);  // sparse
  EXPECT_NE(error_of(folder.path() / "a.json").find("at most"), std::string::npos);
}

}  // namespace
}  // namespace replayssm
