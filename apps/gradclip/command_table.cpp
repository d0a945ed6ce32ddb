#include <array>

#include "option_table.hpp"

namespace gradclip {
namespace {

constexpr std::array<CommandEntry, 12> kCommands{{
    {"clip", Command::clip, kClip, true, "clip DUMP -o OUT [options]", "scale, measure the total norm, clip",
     "Scales a recorded step's gradients, measures their total norm and clips them into OUT, a dump\n"
     "of the same layout. Shows the right total beside the one that each recorded rank used."},
    {"norms", Command::norms, kNorms, true, "norms DUMP [options]", "the same statistics, writes no gradients",
     "Measures the scaled gradients of a recorded step: a table by parameter, the total, what each\n"
     "recorded rank saw. With --sweep it takes the dumps of several steps. Writes no gradients."},
    {"inspect", Command::inspect, kInspect, true, "inspect DUMP [options]", "what is in a dump; reads no gradient data",
     "Shows what is in a dump: meshes, placements, sizes, training numbers. Reads the manifest only."},
    {"verify", Command::verify, kVerify, true, "verify DUMP [options]", "everything that is wrong with a dump",
     "Checks a dump: files, shapes, placements, types, checksums, copies that should be equal, gradients\n"
     "of nothing but zeros, ranks that would disagree on the total. Lists all that is wrong, worst\n"
     "first, and exits 1 if there is anything."},
    {"diff", Command::diff, kDiff, true, "diff A B [options]", "compares two dumps, whatever their layouts",
     "Compares the gradients of two dumps in global coordinates: two layouts, two frameworks, two steps.\n"
     "Names the first parameter that differs, and a constant ratio as what it is. Exits 1 if anything differs."},
    {"check", Command::check, kCheck, true, "check DUMP --baseline FILE [--update] [options]",
     "norms and findings against a committed baseline",
     "Measures a dump as norms does and compares it with a baseline file: counts exactly, norms within tolerances.\n"
     "Exits 1 if anything regressed, if there is no baseline yet, and, without --allow-nonfinite,\n"
     "for NaN and infinities."},
    {"merge", Command::merge, kMerge, true, "merge DUMP -o OUT [options]", "full tensors, one for each parameter",
     "Puts the shards of every parameter together and writes the full tensors: into OUT, a dump of one\n"
     "rank, or a safetensors file. Raw values: nothing is scaled."},
    {"tokens", Command::tokens, kTokens, true, "tokens DUMP [options]", "label tokens and padding of a step",
     "Counts the label tokens of a recorded step, once for each data-parallel coordinate, and the padding\n"
     "at the end of its sequences. Compares the copies of labels on tp, cp and pp ranks. Reads no gradients."},
    {"accumulate", Command::accumulate, kAccumulate, true, "accumulate DUMP... -o OUT [options]",
     "the gradient of a step from its microbatches",
     "Replays gradient accumulation: the dumps of all microbatches of a step become OUT, what the step\n"
     "clips, as FSDP2 makes it: one reduction at the last microbatch, or where --sync says."},
    {"synth", Command::synth, kSynth, false, "synth -o OUT --model MODEL [options]",
     "a synthetic dump of a model's shapes",
     "Makes a dump of a model's shapes on any mesh, of any type. Its values depend on the seed, the\n"
     "parameter and the global index alone: two layouts of one seed hold the same gradient."},
    {"report", Command::report, kReport, true, "report FILE.json -o FILE.html [options]",
     "one HTML page of a JSON report",
     "Makes one self-contained HTML page of a report that --report FILE.json wrote: findings, norms and\n"
     "differences by layer, shares, what each rank holds, a table. The page loads nothing."},
    {"doctor", Command::doctor, kDoctor, false, "doctor [options]", "what this build and this machine offer",
     "Shows what this build and this machine offer: versions, processor, memory, communicators."},
}};

}  // namespace

std::span<const CommandEntry> command_table() {
  return kCommands;
}

const std::vector<OptionDescription>& universal_options() {
  static const std::vector<OptionDescription> options{
      {.name = "config", .metavar = "FILE.json", .help = "options from a file, long names as keys", .common = true},
      {.name = "version", .help = "print the version", .common = true},
      {.name = "help", .letter = "h", .help = "print this", .common = true}};
  return options;
}

std::string_view name(Command command) noexcept {
  for (const CommandEntry& entry : kCommands) {
    if (entry.command == command) return entry.name;
  }
  return {};
}

}  // namespace gradclip
