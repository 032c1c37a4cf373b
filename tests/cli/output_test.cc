// What the commands print, with the bundled models.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace {

using nlohmann::json;
using replayssm::testing::quoted;
using replayssm::testing::run;

constexpr const char* kQuiet = "2>/dev/null </dev/null";
const std::vector<std::string> kModels = {"tiny-qwen3.5", "tiny-nemotron-h"};

json golden(const std::string& model) {
  return json::parse(std::ifstream(REPLAYSSM_SOURCE_DIR "/tests/golden/" + model + ".json"));
}

std::string joined(const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) text += (text.empty() ? "" : ",") + std::to_string(id);
  return text;
}

json parsed(const std::vector<std::string>& arguments) {
  const auto result = run(arguments, kQuiet);
  EXPECT_EQ(result.status, 0) << result.output;
  return json::parse(result.output);
}

// The records' float32 logits: 2e-3 of their scale is what the project promises.
TEST(Logits, AreTheRecordedOnes) {
  for (const std::string& model : kModels) {
    const json prompt = golden(model)["prompts"][0];
    const auto ids = prompt["ids"].get<std::vector<int32_t>>();
    const json result = parsed({"logits", model, "--ids", joined(ids), "--positions",
                                "0-" + std::to_string(ids.size() - 1), "--json", "--dtype",
                                "float32", "--max-num-batched-tokens", "4"});
    ASSERT_EQ(result["logits"].size(), ids.size());
    for (size_t position = 0; position < ids.size(); ++position) {
      const json& top_ids = prompt["top_ids"][position];
      const json& top_logits = prompt["top_logits"][position];
      for (size_t i = 0; i < top_ids.size(); ++i) {
        const double expected = top_logits[i];
        const double actual = result["logits"][position][top_ids[i].get<size_t>()];
        EXPECT_NEAR(actual, expected, 2e-3 * std::abs(top_logits[0].get<double>()));
      }
    }
  }
}

// The names that --cpu-target takes on this machine, widest first, from what refuses another.
std::vector<std::string> cpu_targets() {
  const std::string refusal =
      run({"logits", "tiny-qwen3.5", "--ids", "1", "--cpu-target", "mmx"}).output;
  const std::string before = "--cpu-target: mmx not in {auto,";
  const size_t begin = refusal.find(before);
  EXPECT_NE(begin, std::string::npos) << refusal;
  std::istringstream list(
      refusal.substr(begin + before.size(), refusal.find('}') - begin - before.size()));
  std::vector<std::string> names;
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

TEST(BenchDecode, SweepsOverBatchSizes) {
  const std::vector<std::string> arguments = {
      "bench",   "decode",    REPLAYSSM_SOURCE_DIR "/tests/golden/random/mamba2",
      "--sweep", "2,1",       "--num-steps",
      "16",      "--repeats", "1"};
  auto as_json = arguments;
  as_json.emplace_back("--json");
  const json reports = parsed(as_json);
  ASSERT_EQ(reports.size(), 2);
  EXPECT_EQ(reports[0]["batch_size"], 2);
  EXPECT_EQ(reports[1]["batch_size"], 1);
  for (const json& report : reports) {
    EXPECT_EQ(report["results"].size(), 3);
    for (const json& result : report["results"]) EXPECT_GT(result["ms_per_step"], 0);
  }
  const std::string plot = ::testing::TempDir() + "sweep.svg";
  auto with_plot = arguments;
  with_plot.insert(with_plot.end(), {"--plot", plot});
  std::istringstream lines(run(with_plot, kQuiet).output);
  std::stringstream contents;
  contents << std::ifstream(plot).rdbuf();
  const std::string figure = contents.str();
  EXPECT_TRUE(figure.starts_with("<svg "));
  EXPECT_TRUE(figure.ends_with("</svg>\n"));
  for (const char* route : {"conventional", "state_and_output", "output_only"})
    EXPECT_NE(figure.find(std::string(">") + route + "</text>"), std::string::npos) << route;
  std::vector<std::string> rows;
  for (std::string line; std::getline(lines, line);) rows.push_back(line);
  ASSERT_EQ(rows.size(), 5);  // what, nothing, names, a row each
  EXPECT_TRUE(rows[3].starts_with("     2"));
  EXPECT_TRUE(rows[4].starts_with("     1"));
  EXPECT_NE(run({"bench", "decode", "tiny-qwen3.5", "--sweep", "4,0"}).status, 0);
  EXPECT_NE(run({"bench", "decode", "tiny-qwen3.5", "--plot", "x.svg"}).status, 0);
}

// All drafts are right: a window of two always brings three tokens.
TEST(BenchSpec, ComparesWaysOfDecodingOverBatchSizes) {
  const std::string plot = ::testing::TempDir() + "spec.svg";
  const json reports = parsed({"bench",
                               "spec",
                               "tiny-qwen3.5",
                               "--batch-size",
                               "1,2",
                               "--num-steps",
                               "4",
                               "--warmup-steps",
                               "1",
                               "--repeats",
                               "1",
                               "--prompt-len",
                               "8",
                               "--simulate-acceptance",
                               "3",
                               "--num-speculative-tokens",
                               "2",
                               "--speculative-config",
                               R"({"method": "ngram", "adaptive": false})",
                               "--json",
                               "--plot",
                               plot});
  ASSERT_EQ(reports.size(), 2);
  const std::vector<std::string> modes = {"conventional", "standard", "snapshot-spec",
                                          "replay-spec"};
  for (const json& report : reports) {
    ASSERT_EQ(report["results"].size(), modes.size());
    for (size_t i = 0; i < modes.size(); ++i) {
      const json& result = report["results"][i];
      EXPECT_EQ(result["mode"], modes[i]);
      EXPECT_GT(result["tokens_per_second"], 0);
      EXPECT_NEAR(result["acceptance_length"], i < 2 ? 1 : 3, 1e-9);
      EXPECT_GT(result["most_requests"], 0);
    }
    EXPECT_GT(report["results"][3]["most_requests"], report["results"][2]["most_requests"]);
  }
  std::stringstream figure;
  figure << std::ifstream(plot).rdbuf();
  for (const std::string& mode : modes)
    EXPECT_NE(figure.str().find(">" + mode + "</text>"), std::string::npos) << mode;
  EXPECT_NE(run({"bench", "spec", "tiny-qwen3.5", "--plot", "/nowhere/x.svg"}).status, 0);
}

// Every instruction set sums in another order, to the same logits within what the project promises.
TEST(Logits, AgreeOnEveryInstructionSet) {
  const auto logits = [](const std::string& target) {
    const json result = parsed({"logits", "tiny-nemotron-h", "--ids", "1,2,3,40,50,60", "--json",
                                "--dtype", "float32", "--cpu-target", target});
    return result["logits"][0].get<std::vector<double>>();
  };
  const std::vector<double> widest = logits("auto");
  const auto largest =
      *std::ranges::max_element(widest, {}, [](double logit) { return std::abs(logit); });
  const std::vector<std::string> targets = cpu_targets();
  ASSERT_FALSE(targets.empty());
  for (const std::string& target : targets) {
    const std::vector<double> narrow = logits(target);
    if (target != targets.front()) {
      EXPECT_NE(narrow, widest) << target;
    }
    for (size_t i = 0; i < narrow.size(); ++i)
      ASSERT_NEAR(narrow[i], widest[i], 2e-3 * std::abs(largest)) << target;
  }
}

// Two prompts together, on every route, give the recorded greedy ids wherever the best logit leads
// by more than the error that is promised for it.
TEST(Generate, GivesTheRecordedTokensOnEveryRoute) {
  const std::vector<std::vector<std::string>> routes = {
      {"--no-use-replayssm"},
      {"--replayssm-route", "output_only"},
      {"--replayssm-route", "state_and_output", "--replayssm-buffer-len", "3"},
      {"--replayssm-read-dtype", "float16"},
      {"--cpu-target", cpu_targets().back()}};
  for (const std::string& model : kModels) {
    const json prompts = golden(model)["prompts"];
    for (const auto& route : routes) {
      std::vector<std::string> arguments = {
          "generate", model,     "--prompt",     prompts[0]["text"], "--prompt", prompts[1]["text"],
          "--dtype",  "float32", "--ignore-eos", "--max-tokens",     "16",       "--logprobs",
          "1"};
      arguments.insert(arguments.end(), route.begin(), route.end());
      std::istringstream lines(run(arguments, kQuiet).output);
      std::vector<std::vector<int32_t>> ids(2);
      for (std::string line; std::getline(lines, line);) {
        const json token = json::parse(line);
        EXPECT_EQ(token["top"][0]["id"], token["id"]);
        ids.at(token["prompt"]).push_back(token["id"]);
      }
      for (size_t prompt = 0; prompt < ids.size(); ++prompt) {
        ASSERT_EQ(ids[prompt].size(), 16);
        for (size_t i = 0; i < 16; ++i) {
          if (prompts[prompt]["greedy_margins"][i] < 0.1) break;
          EXPECT_EQ(ids[prompt][i], prompts[prompt]["greedy_ids"][i]) << model << " token " << i;
        }
      }
    }
  }
}

TEST(Generate, ReadsThePromptFromAnywhere) {
  const std::string prompt = "def add(a, b):\n    ";
  const std::string file = ::testing::TempDir() + "replayssm_cli_test_prompt";
  std::ofstream(file) << prompt;
  const std::vector<std::string> base = {"generate", "tiny-qwen3.5", "--max-tokens", "6"};
  const auto with = [&](std::vector<std::string> more, const std::string& redirections) {
    std::vector<std::string> arguments = base;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments, redirections).output;
  };
  const std::string expected = with({"--prompt", prompt}, kQuiet);
  EXPECT_GT(expected.size(), 6);
  EXPECT_EQ(with({"--prompt-file", file}, kQuiet), expected);
  EXPECT_EQ(with({}, "2>/dev/null <" + quoted(file)), expected);
  EXPECT_EQ(with({"--prompt", prompt, "--max-num-seqs", "1", "--prompt", prompt}, kQuiet),
            expected + expected);
  EXPECT_EQ(with({"--prompt", prompt, "--stop", expected.substr(2, 3)}, kQuiet),
            expected.substr(0, 2) + "\n");
  EXPECT_NE(with({"--prompt", prompt, "--chat"}, kQuiet), expected);
  std::remove(file.c_str());
}

TEST(BenchAccuracy, AgreesOnEveryRoute) {
  const json report = parsed({"bench", "accuracy", "tiny-nemotron-h", "--text",
                              REPLAYSSM_SOURCE_DIR "/models/eval.txt", "--dtype", "float32",
                              "--max-tokens", "100", "--window", "24", "--json"});
  ASSERT_EQ(report["results"].size(), 4);
  const double expected = report["results"][0]["mean_nll"];
  for (const json& result : report["results"]) {
    EXPECT_EQ(result["tokens"], 4 * 23 + 3);
    EXPECT_NEAR(result["mean_nll"], expected, 2e-3);
    EXPECT_DOUBLE_EQ(result["perplexity"], std::exp(result["mean_nll"].get<double>()));
  }
}

TEST(BenchDecode, ReportsEveryRoute) {
  const json report = parsed({"bench", "decode", "tiny-qwen3.5", "--batch-size", "3", "--num-steps",
                              "5", "--warmup-steps", "0", "--repeats", "1", "--prompt-len", "5",
                              "--replayssm-buffer-len", "4", "--json"});
  ASSERT_EQ(report["results"].size(), 3);
  EXPECT_EQ(report["num_steps"], 16);
  EXPECT_GT(report["bandwidth"]["read_gb_per_second"], 0);
  for (const json& result : report["results"]) {
    const double ms = result["ms_per_step"];
    EXPECT_DOUBLE_EQ(result["tokens_per_second"], 3e3 / ms);
    double stages = 0;
    for (const auto& [name, value] : result["stages"].items()) stages += value.get<double>();
    EXPECT_GT(result["stages"]["ssm"], 0);
    EXPECT_LT(stages, 1.05 * ms) << result;
    EXPECT_GT(stages, 0.5 * ms) << result;
  }
  // 6 layers of 4 heads x 128 x 128 fp32, 3 rows, read and written.
  EXPECT_EQ(report["results"][0]["state_bytes_per_step"], 6.0 * 4 * 128 * 128 * 4 * 3 * 2);
}

TEST(BenchDecode, ReportsReadCopies) {
  const std::vector<std::string> base = {"bench",
                                         "decode",
                                         "tiny-qwen3.5",
                                         "--batch-size",
                                         "2",
                                         "--num-steps",
                                         "4",
                                         "--warmup-steps",
                                         "0",
                                         "--repeats",
                                         "1",
                                         "--prompt-len",
                                         "5",
                                         "--replayssm-buffer-len",
                                         "4",
                                         "--replayssm-read-dtype",
                                         "int8"};
  auto arguments = base;
  arguments.emplace_back("--json");
  const json report = parsed(arguments);
  EXPECT_EQ(report["replayssm_read_dtype"], "int8");
  const double rows = 6.0 * 4 * 128 * 2;  // layers, heads, rows of a head, sequences
  EXPECT_EQ(report["read_copy_bytes"], rows * (128 + 4));
  EXPECT_EQ(report["checkpoint_bytes"], rows * 128 * 4);
  EXPECT_EQ(report["results"][0]["state_bytes_per_step"], rows * 128 * 4 * 2);
  // Three steps of a cycle read the copy; the fourth rewrites checkpoint and copy. Ring rows: 2.5
  // read and one written, of v, k and two gates per head.
  const double ring = 6.0 * 2 * 3.5 * ((4 * 128 + 4 * 128) * 2 + 4 * 2 * 4);
  EXPECT_LE(report["results"][2]["state_bytes_per_step"],
            rows * ((128 + 4) + 128 * 4 * 2.0 / 4) + ring);
  EXPECT_GE(report["results"][2]["state_bytes_per_step"], rows * ((128 + 4) + 128 * 4 * 2.0 / 4));
  const std::string table = run(base, kQuiet).output;
  EXPECT_NE(table.find("int8 read copy of 0.8 MB"), std::string::npos) << table;
}

// Small states: what is measured is not judged, what is computed is.
TEST(BenchOp, ReportsEveryVariantOfEveryOp) {
  const std::vector<std::string> small = {"--state-gib", "0", "--repeats",    "1", "--heads", "4",
                                          "--key-heads", "2", "--batch-size", "3", "--json"};
  const auto report_of = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"bench", "op"});
    arguments.insert(arguments.end(), small.begin(), small.end());
    return parsed(arguments);
  };
  const json decode = report_of({"gdn_decode", "--state-dtype", "bfloat16", "--buffer-len", "4"});
  ASSERT_EQ(decode["results"].size(), 3);
  EXPECT_EQ(decode["calls"], 1);
  EXPECT_EQ(decode["state_bytes"], 3 * 4 * 128 * 128 * 2);
  EXPECT_GT(decode["bandwidth"]["write_gb_per_second"], 0);
  EXPECT_EQ(decode["results"][0]["variant"], "conventional");
  EXPECT_EQ(decode["results"][0]["speedup"], 1);
  EXPECT_EQ(decode["results"][0]["bytes"]["read_modify_write"], 2.0 * 3 * 4 * 128 * 128 * 2);
  EXPECT_EQ(decode["results"][2]["bytes"]["read_only"], 0.75 * 3 * 4 * 128 * 128 * 2);
  for (const json& result : decode["results"]) EXPECT_GT(result["us"], 0);

  const json verify = report_of({"mamba2_verify", "--window", "3", "--accepted", "2"});
  EXPECT_EQ(verify["window"], 3);
  EXPECT_EQ(verify["accepted"], 2);
  EXPECT_EQ(verify["head_dim"], 80);
  EXPECT_EQ(verify["results"][0]["variant"], "snapshots");
  EXPECT_EQ(verify["results"][0]["bytes"]["write_only"], 3.0 * 3 * 4 * 80 * 128 * 4);
  EXPECT_EQ(verify["results"].back()["variant"], "output_only, 1 token");
  EXPECT_GT(report_of({"kda_decode"})["results"][0]["us"], 0);
  EXPECT_GT(report_of({"gdn_snapshots", "--window", "7"})["results"][0]["us"], 0);

  const double state = 3.0 * 4 * 128 * 128 * 4;
  const json prefill = report_of({"prefill", "--window", "7"});
  const json fold = report_of({"fold", "--buffer-len", "5"});
  for (const auto& [report, tokens] : {std::pair{prefill, 7}, {fold, 5}}) {
    ASSERT_EQ(report["results"].size(), 2);
    EXPECT_EQ(report["results"][0]["variant"], "conventional, by token");
    EXPECT_EQ(report["results"][0]["bytes"]["read_modify_write"], 2 * tokens * state);
    EXPECT_EQ(report["results"][1]["bytes"]["read_modify_write"], 2 * state);
    for (const json& result : report["results"]) {
      EXPECT_GT(result["us"], 0);
      EXPECT_EQ(result["tokens"], 3 * tokens);
    }
  }
  const json conv = report_of({"conv"});
  ASSERT_EQ(conv["results"].size(), 2);
  EXPECT_EQ(conv["results"][0]["variant"], "shifting window");
  const double row = 3.0 * (4 * 128 + 2 * 2 * 128) * 2;  // sequences, channels, bfloat16
  EXPECT_EQ(conv["results"][0]["bytes"]["read_modify_write"], 2 * 3 * row);
  EXPECT_EQ(conv["results"][1]["bytes"]["ring"], (3 + 1) * row);
}

// The float32 states of a sweep are exactly those of no rounding; every other format costs
// something, a bad one in the recurrence more than a good one in the read copy.
TEST(PrecisionSweep, SeparatesReadingFromTheRecurrence) {
  for (const std::string& model : kModels) {
    const json report = parsed({"bench",
                                "accuracy",
                                model,
                                "--precision-sweep",
                                "--text",
                                REPLAYSSM_SOURCE_DIR "/models/eval.txt",
                                "--window",
                                "65",
                                "--max-tokens",
                                "130",
                                "--dtype",
                                "float32",
                                "--read-formats",
                                "float32,int8",
                                "--recurrence-formats",
                                "float32,int4-sr",
                                "--buffer-lens",
                                "1,8",
                                "--threads",
                                "1",
                                "--json"});
    EXPECT_EQ(report["tokens"], 128);
    ASSERT_EQ(report["results"].size(), 8u);
    for (const json& result : report["results"]) {
      const bool exact = result["read"] == "float32" && result["recurrence"] == "float32";
      EXPECT_EQ(result["mean_kl"] == 0.0, exact) << result.dump();
      ASSERT_EQ(result["quarter_kl"].size(), 4u);
      EXPECT_TRUE(std::isfinite(result["mean_nll"].get<double>()));
    }
    const auto kl = [&](size_t i) { return report["results"][i]["mean_kl"].get<double>(); };
    EXPECT_GT(kl(6), 10 * kl(5)) << "a recurrence of int4 against a read copy of int8";
  }
}

}  // namespace
