#include "gradclip/analysis/merged_output.hpp"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <string>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/dump_writer.hpp"
#include "gradclip/dump/manifest_text.hpp"
#include "gradclip/dump/new_rank_file.hpp"
#include "gradclip/dump/posix_file.hpp"
#include "gradclip/dump/safetensors_file.hpp"

namespace gradclip {
namespace {

constexpr const char* kRankFile = "rank_00000.h5";

class MergedDump final : public MergedOutput {
 public:
  MergedDump(const DumpReader& input, const std::filesystem::path& output, bool overwrite)
      : input_(input), writer_(input.directory(), output, overwrite) {}

  [[nodiscard]] MergeFormat format() const noexcept override { return MergeFormat::dump; }

  [[nodiscard]] std::vector<std::uint64_t> create(const std::vector<MergedTensor>& tensors) override {
    std::vector<NewGradient> gradients;
    std::vector<std::string> none;
    for (const MergedTensor& tensor : tensors) {
      if (tensor.none) {
        none.push_back(entry_of(tensor).recorded_name());
      } else {
        gradients.push_back({tensor.dataset, tensor.tensor.shape, tensor.dtype, tensor.scale_inv});
      }
    }
    writer_.prepare();
    file_.emplace(file(), NewRankFileHead{0, 1, input_.manifest().step}, gradients, none);
    std::vector<std::uint64_t> offsets;
    auto next = file_->offsets().begin();
    for (const MergedTensor& tensor : tensors) offsets.push_back(tensor.none ? 0 : *next++);
    return offsets;
  }

  [[nodiscard]] std::filesystem::path file() override { return writer_.writing_directory() / kRankFile; }
  [[nodiscard]] bool takes_checksums() const noexcept override { return true; }

  void finish(const std::vector<MergedTensor>& tensors, std::span<const std::uint64_t> checksums) override {
    std::vector<std::uint64_t> of_gradients;
    std::vector<std::string> entries;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].none) of_gradients.push_back(checksums[i]);
      entries.push_back(parameter_text(entry_of(tensors[i]), nullptr));
    }
    const FileRecord record = file_->finish(of_gradients, false);
    const Manifest& manifest = input_.manifest();
    // Pipeline parallelism needs an axis to be on: here it has one stage.
    std::optional<DeviceMesh> mesh;
    if (manifest.training.pp_enabled.value_or(false)) {
      mesh.emplace("merged", std::vector{manifest.training.pp_axis_name.value_or("pp")}, std::vector<std::int64_t>{1},
                   std::vector<std::int32_t>{0});
    }
    writer_.finish_with(edited_manifest(
        input_.directory(), input_.manifest(),
        {{"world_size", "1"},
         {"rank_file", R"("rank_{rank:05d}.h5")"},
         {"meshes", mesh ? fmt::format("{{{}}}", mesh_text(*mesh)) : "{}"},
         {"device_mesh", mesh ? R"("merged")" : "null"},
         {"moe_mesh", "null"},
         {"parameters", parameters_text(entries)},
         {"files", files_text({{kRankFile, record}})},
         {"merge", fmt::format(R"({{"version":"{}","world_size":{}}})", GRADCLIP_VERSION, manifest.world_size)}}));
  }

  void discard() noexcept override { writer_.discard(); }

 private:
  /// The parameter as the output's manifest has it: a plain tensor of its one rank.
  [[nodiscard]] ParameterEntry entry_of(const MergedTensor& tensor) const {
    const Manifest& manifest = input_.manifest();
    const ParameterEntry& from = manifest.parameters[tensor.tensor.parameter];
    ParameterEntry entry;
    entry.name = tensor.name;
    entry.dataset = tensor.dataset;
    entry.own_dataset = tensor.dataset != link_name(tensor.name);
    entry.model_part = from.model_part;
    entry.shape = tensor.tensor.shape;
    entry.dtype = tensor.dtype;
    entry.ranks = {0};
    entry.copies = Copies::replicated;
    entry.expert = from.expert;
    // What told it from the others was its mesh.
    if (manifest.is_expert(from, manifest.training.ep_axis_name.value_or(""))) entry.expert = true;
    entry.tied = from.tied;
    return entry;
  }

  const DumpReader& input_;
  DumpWriter writer_;
  std::optional<NewRankFile> file_;
};

class MergedSafetensors final : public MergedOutput {
 public:
  MergedSafetensors(const DumpReader& input, const std::filesystem::path& output, bool overwrite)
      : input_(input), output_(input.directory(), output, overwrite, OutputKind::file) {}

  [[nodiscard]] MergeFormat format() const noexcept override { return MergeFormat::safetensors; }

  [[nodiscard]] std::vector<std::uint64_t> create(const std::vector<MergedTensor>& tensors) override {
    std::vector<SafetensorsEntry> entries;
    for (const MergedTensor& tensor : tensors) {
      if (tensor.written()) entries.push_back({tensor.name, tensor.dtype, tensor.tensor.shape});
    }
    const SafetensorsLayout layout = safetensors_layout(entries, metadata(tensors), input_.directory().string());
    output_.prepare();
    const PosixFile made = PosixFile::open_for_writing(file(), true);
    made.allocate(0, layout.bytes);
    made.write(0, layout.head.data(), layout.head.size());
    std::vector<std::uint64_t> offsets;
    auto next = layout.offsets.begin();
    for (const MergedTensor& tensor : tensors) offsets.push_back(tensor.written() ? *next++ : 0);
    return offsets;
  }

  [[nodiscard]] std::filesystem::path file() override {
    output_.touch();
    return output_.made();
  }
  [[nodiscard]] bool takes_checksums() const noexcept override { return false; }
  void finish(const std::vector<MergedTensor>&, std::span<const std::uint64_t>) override {
    PosixFile::open_for_writing(file(), false).sync();
    output_.publish();
  }
  void discard() noexcept override { output_.discard(); }

 private:
  /// Where the tensors come from. Nothing of the run: the same dump gives the same bytes.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> metadata(
      const std::vector<MergedTensor>& tensors) const {
    const Manifest& manifest = input_.manifest();
    std::vector<std::pair<std::string, std::string>> members{
        {"format", "pt"},  // what PyTorch's tools look for
        {"origin", "gradients, merged by gradclip " GRADCLIP_VERSION},
        {"state", std::string(name(manifest.state))},
        {"world_size", fmt::to_string(manifest.world_size)}};
    if (manifest.step) members.emplace_back("step", fmt::to_string(*manifest.step));
    if (manifest.microbatch) {
      members.emplace_back("microbatch",
                           fmt::format("{} of {}", manifest.microbatch->index, manifest.microbatch->count));
    }
    if (!manifest.producer.empty()) members.emplace_back("producer", manifest.producer);
    std::string none;
    for (const MergedTensor& tensor : tensors) {
      if (tensor.none && !tensor.stand_in) none += (none.empty() ? "" : "\n") + tensor.name;
    }
    if (!none.empty()) members.emplace_back("none", none);
    return members;
  }

  const DumpReader& input_;
  PartialOutput output_;
};

}  // namespace

std::unique_ptr<MergedOutput> make_merged_output(const DumpReader& input, const std::filesystem::path& output,
                                                 bool overwrite, MergeFormat format) {
  if (format == MergeFormat::safetensors) return std::make_unique<MergedSafetensors>(input, output, overwrite);
  return std::make_unique<MergedDump>(input, output, overwrite);
}

}  // namespace gradclip
