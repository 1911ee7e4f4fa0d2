// Public models: what is read, refused, trained and written back. Their numbers: golden_models_test.cpp.
#include <fstream>

#include "tests/trainer/model_folders.hpp"
#include "tests/trainer/rig_checks.hpp"

namespace terrace::trainer::test {
namespace {

namespace fs = std::filesystem;

class ModelFamily : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    for (char& c : name) c = c == '/' ? '-' : c;
    folder_ = fs::path(::testing::TempDir()) / ("family-" + name);
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path(const char* name) const { return (folder_ / name).string(); }
  [[nodiscard]] Rig::Options options(const char* name) const {
    Rig::Options options;
    options.model = path(name);
    options.config.train.micro_batches = 1;
    return options;
  }
  // Reads one folder and writes another.
  void write_back(const char* from, const char* to) const {
    Rig rig(options(from));
    rig.trainer().export_model(path(to));
  }

  fs::path folder_;
};

TEST_P(ModelFamily, ComesBackBitByBit) {
  make_model_folder(path("one"), small_description(GetParam()));
  write_back("one", "two");
  EXPECT_EQ(tensors_in(path("two")), tensors_in(path("one")));
  std::ifstream written(path("two/config.json"));
  EXPECT_EQ(nlohmann::json::parse(written), small_description(GetParam()));
  const auto header = require(SafetensorsReader::open(path("two/model.safetensors")));
  EXPECT_EQ(header.metadata().at("format"), "pt");
}

TEST_P(ModelFamily, ReadsSeveralFilesAndHalfPrecision) {
  const FolderForm form{.type = DType::kBf16, .files = 3};
  make_model_folder(path("one"), small_description(GetParam()), form);
  write_back("one", "two");
  EXPECT_EQ(tensors_in(path("two")), tensors_in(path("one")));
}

// Released files hold experts and convolutions one by one; written back they are the library's tensors.
TEST_P(ModelFamily, ReadsTheNamesOfReleasedFiles) {
  make_model_folder(path("one"), small_description(GetParam()));
  make_model_folder(path("released"), small_description(GetParam()), {.names = FolderForm::Names::kReleased});
  EXPECT_NE(tensors_in(path("released")).size(), tensors_in(path("one")).size());
  write_back("released", "two");
  EXPECT_EQ(tensors_in(path("two")), tensors_in(path("one")));
}

TEST_P(ModelFamily, TrainsAndGivesTheSameBitsHoweverActivationsAreKept) {
  make_model_folder(path("one"), small_description(GetParam()));
  Rig::Options options = this->options("one");
  options.config.train.micro_batches = 2;
  const auto losses = expect_same_bits_however_kept(options, 6);
  EXPECT_LT(losses.back(), losses.front());
}

TEST_P(ModelFamily, TrainedAndWrittenBackItGoesOnFromThere) {
  make_model_folder(path("one"), small_description(GetParam()));
  float next = 0;
  {
    Rig rig(options("one"));
    (void)rig.steps(3);
    rig.trainer().export_model(path("two"));
    next = rig.trainer().step();
  }
  EXPECT_NE(tensors_in(path("two")), tensors_in(path("one")));
  Rig::Options same_text = options("two");
  Rig read(same_text);
  Rig fresh(options("one"));
  EXPECT_NE(read.trainer().step(), fresh.trainer().step());
  EXPECT_GT(next, 0.0F);
}

// The fp32 values are in the file of [nvme] then, where they are set by the folder and read for the export.
TEST_P(ModelFamily, IsReadAndWrittenWhereStateIsOnNvme) {
  make_model_folder(path("one"), small_description(GetParam()));
  Rig::Options options = this->options("one");
  options.config.train.compute = Dtype::kBf16;
  float resident = 0;
  {
    Rig rig(options);
    resident = rig.steps(2).back();
    rig.trainer().export_model(path("resident"));
  }
  options.optimizer = {.tier = StateTier::kDdr};
  options.ddr = Amount::of(3_MiB);
  options.nvme = {.path = ::testing::TempDir(), .budget = 8_MiB};
  Rig rig(options);
  rig.trainer().export_model(path("two"));
  EXPECT_EQ(tensors_in(path("two")), tensors_in(path("one")));
  EXPECT_EQ(rig.steps(2).back(), resident);
  rig.trainer().export_model(path("two"));
  EXPECT_EQ(tensors_in(path("two")), tensors_in(path("resident")));
  EXPECT_GT(rig.trainer().model().nvme_bytes(Pool::kOptimizer), 0_B);
}

TEST_P(ModelFamily, RefusesWhatItCannotRead) {
  const nlohmann::json description = small_description(GetParam());
  const auto refusal = [&](const nlohmann::json& other) {
    fs::remove_all(path("bad"));
    make_model_folder(path("bad"), description);
    std::ofstream(path("bad/config.json")) << other.dump();
    return failure_of([&] { (void)ModelFolder::open(path("bad")); });
  };
  nlohmann::json other = description;
  other["tie_word_embeddings"] = true;
  EXPECT_NE(refusal(other).find("tie_word_embeddings"), std::string::npos);
  other = description;
  other["hidden_size"] = 40;
  EXPECT_NE(refusal(other).find("config.json asks for"), std::string::npos);
  other = description;
  other["num_hidden_layers"] = "many";
  EXPECT_NE(refusal(other).find("num_hidden_layers"), std::string::npos);
  other = description;
  other["model_type"] = "abacus";
  EXPECT_NE(refusal(other).find("kimi_linear, deepseek_v32, qwen3_moe"), std::string::npos);
  other = description;
  other.erase("vocab_size");
  EXPECT_NE(refusal(other).find("vocab_size is missing"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(All, ModelFamily, ::testing::ValuesIn(kFamilyNames),
                         [](const auto& info) { return info.param; });

class ModelFolderFiles : public ModelFamily {};

TEST_P(ModelFolderFiles, NamesTheFileThatIsWrong) {
  EXPECT_NE(failure_of([&] { (void)ModelFolder::open(path("none")); }).find("config.json"),
            std::string::npos);
  make_model_folder(path("one"), small_description(GetParam()), {.files = 2});
  std::ofstream(path("one/model.safetensors.index.json"))
      << R"({"weight_map": {"x": "../model-1.safetensors"}})";
  EXPECT_NE(failure_of([&] { (void)ModelFolder::open(path("one")); }).find("same folder"), std::string::npos);
  std::ofstream(path("one/model.safetensors.index.json"))
      << R"({"weight_map": {"x": "model-1.safetensors"}})";
  EXPECT_NE(failure_of([&] { (void)ModelFolder::open(path("one")); }).find("is in none of its files"),
            std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(One, ModelFolderFiles, ::testing::Values("qwen3_moe"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace terrace::trainer::test
