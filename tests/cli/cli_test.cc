// The program as users meet it: arguments that are wrong end in one line and exit status 1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/program.h"

namespace {

using replayssm::testing::Result;
using replayssm::testing::run;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Case {
  std::vector<std::string> arguments;
  std::string message;
};

void expect_error(const Case& c) {
  const Result result = run(c.arguments);
  const std::string line = ::testing::PrintToString(c.arguments) + "\n" + result.output;
  EXPECT_EQ(result.status, 1) << line;
  EXPECT_THAT(result.output, StartsWith("replayssm: error: ")) << line;
  EXPECT_THAT(result.output, HasSubstr(c.message)) << line;
  EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << line;
  EXPECT_THAT(result.output, EndsWith("\n")) << line;
}

// `generate` with a bundled model, a prompt and more.
Case generate(std::vector<std::string> more, std::string message) {
  std::vector<std::string> arguments = {"generate", "tiny-qwen3.5", "--prompt", "x"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return {arguments, std::move(message)};
}

TEST(CommandLine, RefusesMissingAndUnknownCommands) {
  for (const Case& c : std::vector<Case>{
           {{}, "expected a command (generate, serve, logits, bench), got none"},
           {{"serenade"}, "expected a command (generate, serve, logits, bench), got 'serenade'"},
           {{"bench"}, "bench: expected a command (decode, spec, op, serve, accuracy), got none"},
           {{"bench", "magic"},
            "bench: expected a command (decode, spec, op, serve, accuracy), got 'magic'"},
           {{"--verbose"}, "--verbose"}}) {
    expect_error(c);
  }
}

TEST(CommandLine, RefusesMissingArguments) {
  for (const Case& c :
       std::vector<Case>{{{"generate"}, "MODEL is required"},
                         {{"logits", "tiny-qwen3.5"}, "--ids is required"},
                         {{"bench", "decode"}, "MODEL is required"},
                         {{"bench", "accuracy", "tiny-qwen3.5"}, "--text is required"},
                         generate({"--seed"}, "--seed"),
                         generate({"--system", "y"}, "--system requires --chat")}) {
    expect_error(c);
  }
}

TEST(CommandLine, RefusesUnknownFlagsAndValues) {
  for (const Case& c : {
           generate({"--fast"}, "--fast"),
           generate({"extra"}, "extra"),
           generate({"--device", "gpu"}, "--device: gpu not in {auto,cpu,cuda}"),
           generate({"--dtype", "float64"}, "--dtype: float64 not in {auto,float32,bfloat16}"),
           generate({"--mamba-ssm-cache-dtype", "int8"}, "int8 not in {float32,bfloat16,float16}"),
           generate({"--mamba-ssm-cache-dtype", "auto"}, "--mamba-ssm-cache-dtype"),
           generate({"--replayssm-read-dtype", "int4"},
                    "int4 not in {float16,bfloat16,float8_e4m3fn,int8}"),
           generate({"--replayssm-read-dtype", "int8", "--no-use-replayssm"},
                    "read copy of int8: expected a replay route, got conventional"),
           generate({"--replayssm-read-dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float16"},
                    "expected a type smaller than the state's float16, got bfloat16"),
           generate({"--cpu-target", "mmx"}, "--cpu-target: mmx not in {auto,"),
           generate({"--replayssm-route", "fast"}, "fast not in {output_only,state_and_output}"),
           generate({"--replayssm-buffer-len", "0"}, "--replayssm-buffer-len"),
           generate({"--no-use-replayssm=7"}, "no-use-replayssm"),
           generate({"--ignore-eos=maybe"}, "ignore-eos"),
           generate({"--threads", "-1"}, "--threads: Value -1 not in range"),
           generate({"--threads", "many"}, "--threads: Value many"),
           generate({"--max-tokens", "0"}, "--max-tokens"),
           generate({"--max-tokens", "1e99"}, "--max-tokens"),
           generate({"--max-num-seqs", "0"}, "--max-num-seqs"),
           generate({"--max-num-batched-tokens", "0"}, "--max-num-batched-tokens"),
           generate({"--max-model-len", "-5"}, "--max-model-len"),
           generate({"--seed", "-1"}, "--seed: expected a number from 0 to 18446744073709551615"),
           generate({"--seed", "18446744073709551616"}, "--seed"),
           generate({"--temperature", "hot"}, "--temperature = hot"),
           generate({"--temperature", "-1"}, "temperature: expected at least 0, got -1"),
           generate({"--temperature", "nan"}, "temperature: expected at least 0"),
           generate({"--top-k", "-1"}, "--top-k"),
           generate({"--top-p", "0"}, "top_p: expected above 0, at most 1, got 0"),
           generate({"--min-p", "2"}, "min_p: expected 0 to 1, got 2"),
           generate({"--repetition-penalty", "0"}, "repetition_penalty: expected above 0, got 0"),
           generate({"--presence-penalty", "9"}, "presence_penalty: expected -2 to 2, got 9"),
           generate({"--logprobs", "-1"}, "--logprobs"),
           generate({"--stop-token-ids", "1,x"}, "--stop-token-ids: expected numbers from 0"),
           generate({"--prompt-file", "y"}, "excludes"),
       }) {
    expect_error(c);
  }
}

TEST(CommandLine, RefusesWrongLists) {
  const auto logits = [](const std::string& ids, const std::string& positions,
                         const std::string& message) -> Case {
    return {{"logits", "tiny-qwen3.5", "--ids", ids, "--positions", positions}, message};
  };
  for (const Case& c :
       {logits("1,,2", "0", "--ids: expected numbers from 0"), logits("1,x", "0", "got 'x'"),
        logits("", "0", "--ids"), logits("-1", "0", "--ids"), logits("1-3", "0", "got '1-3'"),
        logits("99999999999999999999", "0", "got '99999999999999999999'"),
        logits("1,2", "1-0", "--positions: expected an ascending range"),
        logits("1,2", "0-2147483647", "--positions"),
        logits("1,2", "0-5", "--positions: expected positions below 2"),
        logits("1,2", "0-", "--positions"), logits("1,2", "a", "--positions")}) {
    expect_error(c);
  }
}

TEST(CommandLine, RefusesWrongBenchmarks) {
  const std::string text = REPLAYSSM_SOURCE_DIR "/models/eval.txt";
  for (const Case& c : std::vector<Case>{
           {{"bench", "decode", "tiny-qwen3.5", "--batch-size", "0"}, "--batch-size"},
           {{"bench", "decode", "tiny-qwen3.5", "--num-steps", "0"}, "--num-steps"},
           {{"bench", "decode", "tiny-qwen3.5", "--repeats", "0"}, "--repeats"},
           {{"bench", "decode", "tiny-qwen3.5", "--prompt-len", "0"}, "--prompt-len"},
           {{"bench", "op", "magic"}, "magic not in {mamba2_decode,"},
           {{"bench", "op", "gdn_decode", "--window", "3"},
            "--window: expected 1 for gdn_decode, got 3"},
           {{"bench", "op", "gdn_verify", "--accepted", "6"},
            "--accepted: expected at most the window's 5 tokens, got 6"},
           {{"bench", "op", "gdn_decode", "--model-shape", "kimi-linear-48b"},
            "--model-shape: expected a model of the family gdn, got kimi-linear-48b"},
           {{"bench", "op", "gdn_decode", "--key-heads", "5"},
            "--key-heads: expected a divisor of the 32 heads, got 5"},
           {{"bench", "op", "gdn_decode", "--state-gib", "60000"},
            "--state-gib: expected states that"},
           {{"bench", "op", "gdn_decode", "--state-gib", "nan"}, "--state-gib"},
           {{"bench", "op", "gdn_decode", "--read-dtype", "float32"}, "--read-dtype"},
           {{"bench", "op", "conv", "--read-dtype", "int8"},
            "--read-dtype: expected none for conv, which reads no copy"},
           {{"bench", "op", "prefill", "--window", "65536", "--batch-size", "65536"},
            "bench op: expected the states, inputs and outputs of a call to fit into the "},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", text, "--window", "1"}, "--window"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", text, "--precision-sweep",
             "--read-formats", "float32,int3"},
            "--read-formats: expected float32, float16"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", text, "--precision-sweep", "--route",
             "prefill"},
            "--route excludes --precision-sweep"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", text, "--buffer-lens", "4"},
            "--buffer-lens requires --precision-sweep"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", text, "--route", "magic"},
            "magic not in {all,prefill,conventional,state_and_output,output_only}"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", "/no/such/file"},
            "--text /no/such/file: No such file or directory"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", "-"},
            "expected at least 2 tokens, got 0"}}) {
    expect_error(c);
  }
}

TEST(Benchmark, StatesMustFitIntoMemory) {
  if (double(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) > 128e9) GTEST_SKIP() << "they do";
  expect_error({{"bench", "decode", "tiny-nemotron-h", "--batch-size", "65536"},
                "--batch-size: expected recurrent states within this machine's"});
}

TEST(Model, IsAFolderOrABundledName) {
  const std::string file = REPLAYSSM_SOURCE_DIR "/models/eval.txt";
  for (const std::string& name : {std::string("no-such-model"), std::string(""), file,
                                  std::string("/no/such/folder"), std::string("../models")}) {
    expect_error(
        {{"generate", name, "--prompt", "x"},
         "MODEL: expected a folder or a bundled model (tiny-nemotron-h, tiny-qwen3.5), got '" +
             name + "'"});
  }
}

TEST(Device, CudaIsRefusedWhereItIsNotThere) {
  expect_error(generate({"--device", "cuda"}, "--device: expected auto or cpu, got cuda"));
  expect_error({{"bench", "decode", "tiny-qwen3.5", "--device", "cuda"}, "--device"});
}

TEST(LoadFormat, DummyWeightsRunAPublishedShape) {
  const auto result = run({"generate", "Qwen3.5-0.8B", "--prompt", "x", "--load-format", "dummy"});
  EXPECT_NE(result.status, 0);  // a shape has no tokenizer
  const std::vector<std::string> logits = {
      "logits", std::string(REPLAYSSM_SOURCE_DIR) + "/tests/golden/random/mamba2", "--ids", "1,2"};
  auto dummy = logits;
  dummy.insert(dummy.end(), {"--load-format", "dummy"});
  const auto random = run(dummy), again = run(dummy), loaded = run(logits);
  EXPECT_EQ(random.status, 0) << random.output;
  EXPECT_EQ(random.output, again.output);
  EXPECT_NE(random.output, loaded.output);
  expect_error(
      {{"logits", "Qwen3.5-0.8B", "--ids", "1"}, "MODEL: expected a folder or a bundled model"});
  expect_error({{"logits", "no-such-shape", "--ids", "1", "--load-format", "dummy"},
                "MODEL: expected a folder or a bundled shape (Kimi-Linear-48B-A3B-Instruct, "});
}

TEST(GpuMemoryUtilization, IsAPart) {
  for (const char* value : {"0", "-0.5", "1.01", "nan"}) {
    expect_error(generate({"--gpu-memory-utilization", value},
                          "--gpu-memory-utilization: expected more than 0 and at most 1, got"));
  }
}

TEST(Prompt, FileMustBeReadable) {
  expect_error({{"generate", "tiny-qwen3.5", "--prompt-file", "/no/such/file"},
                "--prompt-file /no/such/file: No such file or directory"});
  expect_error({{"generate", "tiny-qwen3.5", "--prompt-file", "/tmp"},
                "--prompt-file /tmp: Is a directory"});
  expect_error({{"generate", "tiny-qwen3.5", "--prompt-file", "/dev/zero"},
                "--prompt-file /dev/zero: expected at most"});
}

// What only a loaded model can tell.
TEST(Context, IsTheLimitOfEveryCommand) {
  std::string words;
  for (int i = 0; i < 5000; ++i) words += " return";
  const std::string text = REPLAYSSM_SOURCE_DIR "/models/eval.txt";
  for (const Case& c : std::vector<Case>{
           {{"generate", "tiny-qwen3.5", "--prompt", words}, "expected at most 4095"},
           {{"generate", "tiny-qwen3.5", "--prompt", ""}, "prompt: expected at least one token"},
           {{"generate", "tiny-qwen3.5"}, "--prompt, --prompt-file or text on standard input"},
           generate({"--max-model-len", "5000"}, "max_model_len: expected at most 4096"),
           generate({"--max-num-seqs", "8", "--max-num-batched-tokens", "4"},
                    "max_num_batched_tokens: expected at least max_num_seqs = 8, got 4"),
           generate({"--stop", ""}, "stop: expected a text"),
           {{"logits", "tiny-qwen3.5", "--ids", "1,4096"},
            "expected an id from 0 to 4095, got 4096"},
           {{"bench", "decode", "tiny-qwen3.5", "--num-steps", "5000"},
            "expected at most 4096 tokens"},
           {{"bench", "accuracy", "tiny-qwen3.5", "--text", text, "--window", "5000"},
            "--window: expected at most 4096"}}) {
    expect_error(c);
  }
}

TEST(Model, MustBeWhole) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(::testing::TempDir()) / "replayssm_cli_test_model";
  const fs::path source = fs::path(REPLAYSSM_SOURCE_DIR) / "models/tiny-qwen3.5";
  for (const std::string file : {"config.json", "tokenizer.json", "model.safetensors"}) {
    fs::remove_all(folder);
    fs::create_directory(folder);
    for (const auto& entry : fs::directory_iterator(source)) {
      if (entry.path().filename() != file) fs::copy(entry.path(), folder);
    }
    expect_error({{"generate", folder, "--prompt", "x"}, file});  // missing
    std::ofstream(folder / file) << "{";
    expect_error({{"generate", folder, "--prompt", "x"}, file});  // malformed
  }
  fs::remove_all(folder);
}

TEST(Output, MustBeWritable) {
  const Result result = run({"generate", "tiny-qwen3.5", "--prompt", "x"}, "2>&1 >/dev/full");
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.output, "replayssm: error: standard output: No space left on device\n");
}

TEST(Help, IsThereForEveryCommand) {
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {}, {"generate"}, {"logits"}, {"bench"}, {"bench", "decode"}, {"bench", "accuracy"}}) {
    std::vector<std::string> arguments = command;
    arguments.emplace_back("--help");
    const Result result = run(arguments);
    EXPECT_EQ(result.status, 0);
    EXPECT_THAT(result.output, HasSubstr("Usage: replayssm"));
  }
  EXPECT_EQ(run({"--version"}).output, "replayssm " REPLAYSSM_VERSION "\n");
}

}  // namespace
