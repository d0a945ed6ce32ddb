#include "gradclip/report/html.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <new>
#include <ostream>
#include <sstream>

#include "gradclip/report/html_assets.hpp"
#include "gradclip/report/html_axes.hpp"
#include "gradclip/report/html_data.hpp"
#include "gradclip/report/html_figures.hpp"
#include "gradclip/report/html_listings.hpp"
#include "gradclip/report/html_markup.hpp"
#include "gradclip/report/structured.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostOfAKind = 9;  // findings above the charts; the table has all

// A bar chart: what a tab shows. Ours, and too small to be a file of its own.
constexpr std::string_view kIcon =
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%230b62a8' "
    "d='M1 15V8h3v7zm5.5 0V1h3v14zM12 15V5h3v10z'/%3E%3C/svg%3E";

/// Hexadecimal digits as base64, which a content security policy has. @pre an even number of them
std::string base64(std::string_view hexadecimal) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string result;
  std::uint32_t bits = 0;
  int held = 0;
  for (const char c : hexadecimal) {
    bits = bits << 4 | static_cast<std::uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
    held += 4;
    if (held < 6) continue;
    held -= 6;
    result += kDigits[bits >> held & 63];
  }
  if (held != 0) result += kDigits[bits << (6 - held) & 63];
  while (result.size() % 4 != 0) result += '=';
  return result;
}

std::string policy() {
  return fmt::format(
      "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action "
      "'none'",
      base64(kPageStyleHash), base64(kPageScriptHash));
}

// ---------------------------------------------------------------------------------------------------------------------
// The head: what it is and what came out
// ---------------------------------------------------------------------------------------------------------------------

bool has_passed(const PageItem& item) {
  return item.status == "passed" || item.status == "pass";
}

std::string capitalised(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

struct Verdict {
  std::string text;
  bool good = true;
};

/// Whether `check` had anything but the dump itself to go by: all items but one kind are a baseline's.
bool is_compared(const PageReport& report) {
  return std::any_of(report.items.begin(), report.items.end(),
                     [](const PageItem& item) { return item.item != "nonfinite"; });
}

Verdict verdict_of(const PageReport& report) {
  const std::string findings = counted(report.findings.size(), "finding", "findings");
  if (!report.verdict.empty() || !report.items.empty()) {
    const auto passed = static_cast<std::size_t>(
        std::count_if(report.items.begin(), report.items.end(), [](const PageItem& item) { return has_passed(item); }));
    const bool good = report.verdict.empty()
                          ? passed == report.items.size() && report.findings.empty()
                          : report.verdict == "passed" || report.verdict == "updated" || report.verdict == "unchanged";
    const std::string items =
        is_compared(report)
            ? fmt::format("{} of {}", grouped(passed), counted(report.items.size(), "item passes", "items pass"))
            : "not compared with a baseline";
    return {comma_separated({capitalised(report.verdict), items}), good};
  }
  if (report.other) {
    if (report.findings.empty()) return {"Equal", true};
    const auto unequal =
        static_cast<std::size_t>(std::count_if(report.differences.begin(), report.differences.end(),
                                               [](const PageDifference& p) { return p.status != "equal"; }));
    return {unequal == 0 ? findings
                         : fmt::format("{} of {} not equal, {}", grouped(unequal),
                                       counted(report.differences.size(), "parameter", "parameters"), findings),
            false};
  }
  if (report.findings.empty()) return {report.checked.empty() ? "No findings" : "Clean", true};
  return {findings, false};
}

std::string dump_text(const PageDump& dump) {
  return comma_separated({dump.step ? fmt::format("step {}", *dump.step) : "",
                          counted(dump.world_size, "rank", "ranks"),
                          counted(dump.parameters, "parameter", "parameters"),
                          counted(dump.elements, "element", "elements"), human_bytes(static_cast<double>(dump.bytes))});
}

void write_header(Markup& html, const PageReport& report) {
  const Tag header(html, "header");
  html.element("p", {{"class", "command"}}, "gradclip " + report.command);
  {
    const Tag heading(html, "h1");
    html.element("bdi", {}, report.steps.empty() ? report.dump.path : counted(report.steps.size(), "step", "steps"));
    if (report.other) {
      html.text(" and ");
      html.element("bdi", {}, report.other->path);
    }
  }
  if (report.steps.empty()) html.element("p", {{"class", "sub"}}, (report.other ? "A: " : "") + dump_text(report.dump));
  if (report.other) html.element("p", {{"class", "sub"}}, "B: " + dump_text(*report.other));
  const Verdict verdict = verdict_of(report);
  if (report.command != "inspect" || !verdict.good) {
    html.element("p", {{"class", verdict.good ? "verdict good" : "verdict bad"}}, verdict.text);
  }
}

struct Tile {
  std::string label;
  std::string value;
  std::string remark;
  bool alarm = false;
};

void write_tiles(Markup& html, const std::vector<Tile>& tiles) {
  if (tiles.empty()) return;
  const Tag list(html, "dl", {{"class", "tiles"}});
  for (const Tile& tile : tiles) {
    const Tag item(html, "div", {{"class", tile.alarm ? "alarm" : ""}});
    html.element("dt", {}, tile.label);
    html.element("dd", {}, tile.value);
    if (!tile.remark.empty()) html.element("dd", {{"class", "remark"}}, tile.remark);
  }
}

std::string distance_text(double distance) {
  return distance == 0.0 ? "as the exact total" : fmt::format("{:.2g} from the exact total", distance);
}

std::vector<Tile> norm_tiles(const PageReport& report) {
  std::vector<Tile> tiles;
  if (!report.total) return tiles;
  tiles.push_back({"Total norm", exact_number(*report.total), fmt::format("p = {}", report.norm_type.value_or(2.0)),
                   !std::isfinite(*report.total)});
  if (report.recorded) {
    tiles.push_back({"Logged by the step", exact_number(*report.recorded),
                     report.recorded_distance ? distance_text(*report.recorded_distance)
                     : report.recorded_type   ? fmt::format("p = {}: not compared", *report.recorded_type)
                                              : ""});
  }
  if (report.totals.size() > 1) {
    tiles.push_back({"Ranks saw", counted(report.totals.size(), "total", "different totals"),
                     report.arithmetic + " arithmetic", true});
  } else if (report.totals.size() == 1) {
    tiles.push_back(
        {"Ranks saw", exact_number(report.totals[0].total),
         fmt::format("{}, {} arithmetic", counted(report.totals[0].ranks.size(), "rank", "ranks"), report.arithmetic)});
  }
  if (report.clips) {
    tiles.push_back({"Limit", report.max_norm ? exact_number(*report.max_norm) : "none", report.outcome});
    if (report.coefficient) tiles.push_back({"Coefficient", exact_number(*report.coefficient), ""});
    if (report.total_after)
      tiles.push_back({"Total after", exact_number(*report.total_after), "measured on what was written"});
  }
  if (report.all) {
    const PageParameter& all = *report.all;
    const auto of_all = [&](std::uint64_t some) {
      return all.elements == 0 ? std::string()
                               : percentage(static_cast<double>(some) / static_cast<double>(all.elements));
    };
    tiles.push_back({"Elements", grouped(all.elements), all.max_abs ? "largest " + short_number(*all.max_abs) : ""});
    if (all.zeros) tiles.push_back({"Zeros", grouped(*all.zeros), of_all(*all.zeros)});
    tiles.push_back({"NaN, infinite", fmt::format("{}, {}", grouped(all.nan), grouped(all.posinf + all.neginf)),
                     all.nonfinite() == 0 ? "" : of_all(all.nonfinite()), all.nonfinite() != 0});
  }
  return tiles;
}

template <class Entry>
std::vector<Tile> status_tiles(const std::vector<Entry>& entries, const std::vector<std::string>& order,
                               std::string_view good) {
  std::map<std::string, std::uint64_t> counts;
  for (const Entry& entry : entries) ++counts[entry.status];
  std::vector<Tile> tiles;
  const auto add = [&](const std::string& status) {
    const std::uint64_t count = counts[status];
    tiles.push_back({status.empty() ? "no status" : status, grouped(count), "", count != 0 && status != good});
    counts.erase(status);
  };
  for (const std::string& status : order) add(status);
  while (!counts.empty()) add(std::string(counts.begin()->first));
  return tiles;
}

std::vector<Tile> tiles_of(const PageReport& report) {
  if (report.other) return status_tiles(report.differences, {"equal", "differs", "missing", "extra"}, "equal");
  std::vector<Tile> tiles = norm_tiles(report);
  for (const auto& [label, value] : report.checked) tiles.push_back({label, value, ""});
  return tiles;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sections
// ---------------------------------------------------------------------------------------------------------------------

/// A section with its heading, which the list of sections at the top leads to.
struct Section {
  std::string id;
  std::string title;
  std::string body;
};

class Sections {
 public:
  /// Kept if `write` writes anything.
  template <class Write>
  void add(std::string id, std::string title, const Write& write) {
    std::ostringstream body;
    Markup html(body);
    write(html);
    if (!body.str().empty()) sections_.push_back({std::move(id), std::move(title), std::move(body).str()});
  }

  void write_contents(Markup& html) const {
    const Tag nav(html, "nav", {{"aria-label", "Sections"}});
    for (const Section& section : sections_) html.element("a", {{"href", "#" + section.id}}, section.title);
  }

  void write(Markup& html) const {
    for (const Section& section : sections_) {
      const Tag element(html, "section", {{"id", section.id}, {"aria-labelledby", section.id + "-title"}});
      html.element("h2", {{"id", section.id + "-title"}}, section.title);
      html.verbatim(section.body);
      html.line();
    }
  }

 private:
  std::vector<Section> sections_;
};

void write_facts(Markup& html, const std::vector<PageFact>& facts) {
  if (facts.empty()) return;
  const Tag list(html, "dl", {{"class", "facts"}});
  for (const auto& [label, value] : facts) {
    const Tag item(html, "div");
    html.element("dt", {}, label);
    const Tag definition(html, "dd");
    html.element("bdi", {}, value);
  }
}

/// A name that finds its row in the table below.
void write_name(Markup& html, const std::string& name, bool in_table) {
  if (in_table) {
    const Tag button(html, "button", {{"type", "button"}, {"class", "find"}, {"data-find", name}});
    html.element("bdi", {}, name);
  } else {
    html.element("bdi", {{"class", "name"}}, name);
  }
}

std::string place_text(const Finding& finding) {
  std::string text;
  if (finding.index) text += index_text(*finding.index) + ' ';
  if (!finding.ranks.empty()) text += ranks_text(finding.ranks) + ' ';
  return text;
}

void write_all_findings(Markup& html, const PageReport& report) {
  for (const std::string& sentence : {report.rule, report.summary}) {
    if (!sentence.empty()) html.element("p", {{"class", "rule"}}, sentence);
  }
  if (!report.first_difference.empty()) {
    const Tag first(html, "p", {{"class", "rule"}});
    html.text("The first that is not equal, in model order: ");
    write_name(html, report.first_difference, true);
    if (!report.first_index.empty()) html.text(" at " + report.first_index);
  }
  if (report.findings.empty()) {
    html.element("p", {{"class", "none"}}, report.command == "diff" ? "None: the two are equal by the rule." : "None.");
    return;
  }
  const bool has_table =
      !report.parameters.empty() || !report.differences.empty() || !report.items.empty() || !report.tensors.empty();
  for (auto first = report.findings.begin(); first != report.findings.end();) {
    const auto last =
        std::find_if(first, report.findings.end(), [&](const Finding& other) { return other.kind != first->kind; });
    const auto count = static_cast<std::size_t>(last - first);
    html.element("h3", {{"class", "kind"}}, fmt::format("{} ({})", first->kind, grouped(count)));
    {
      const Tag list(html, "ul", {{"class", "findings"}});
      for (auto finding = first; finding != first + static_cast<std::ptrdiff_t>(std::min(count, kMostOfAKind));
           ++finding) {
        const Tag item(html, "li");
        if (!finding->parameter.empty()) write_name(html, finding->parameter, has_table);
        html.element("span", {{"class", "place"}}, " " + place_text(*finding));
        html.element("bdi", {}, finding->message);
      }
    }
    if (count > kMostOfAKind) {
      const Tag note(html, "p", {{"class", "note"}});
      html.element("a", {{"href", "#all-findings"}}, fmt::format("and {} more", grouped(count - kMostOfAKind)));
    }
    first = last;
  }
  write_finding_ranks(html, report);
}

/// Whether the list of findings leaves some out.
bool has_more_findings(const PageReport& report) {
  std::map<std::string, std::size_t> kinds;
  return std::any_of(report.findings.begin(), report.findings.end(),
                     [&](const Finding& finding) { return ++kinds[finding.kind] > kMostOfAKind; });
}

Sections sections_of(const PageReport& report) {
  Sections sections;
  if (report.command != "inspect" || !report.findings.empty()) {
    sections.add("findings", "Findings", [&](Markup& html) { write_all_findings(html, report); });
  }
  sections.add("items", "Items", [&](Markup& html) { write_item_table(html, report); });
  sections.add("changes", "Changes", [&](Markup& html) { write_finding_table(html, report.changes); });
  sections.add("microbatches", "Microbatches", [&](Markup& html) { write_microbatch_table(html, report); });
  sections.add("ranks", "Ranks", [&](Markup& html) { write_rank_label_table(html, report); });
  sections.add("steps", "Steps", [&](Markup& html) {
    write_steps(html, report);
    write_step_table(html, report);
  });
  sections.add("sweep", "Limits", [&](Markup& html) {
    write_sweep(html, report);
    write_sweep_table(html, report);
  });
  sections.add("totals", "Totals", [&](Markup& html) {
    write_seen_totals(html, report);
    if (!report.scale.empty()) html.element("p", {{"class", "note"}}, "Scale: " + report.scale);
  });
  sections.add("layers", report.other ? "Differences" : "Norms", [&](Markup& html) {
    write_layer_norms(html, report);
    write_module_norms(html, report);
    write_difference_norms(html, report);
    write_difference_statistics(html, report);
  });
  sections.add("shares", report.measured() ? "Shares" : "Sizes",
               [&](Markup& html) { write_module_shares(html, report); });
  sections.add("statistics", "Statistics", [&](Markup& html) { write_layer_statistics(html, report); });
  sections.add("exponents", "Exponents", [&](Markup& html) { write_exponents(html, report); });
  sections.add("sharding", "Sharding", [&](Markup& html) {
    if (!report.groups.empty()) write_parts(html, {"sharding group", report.groups});
    write_sharding(html, report);
  });
  sections.add("parts", "Parts", [&](Markup& html) {
    for (const PageParts& parts : report.parts) write_parts(html, parts);
  });
  sections.add("parameters", "Parameters", [&](Markup& html) {
    write_parameter_table(html, report);
    write_difference_table(html, report);
    write_tensor_table(html, report);
  });
  sections.add("worst", "Worst elements", [&](Markup& html) { write_worst_table(html, report); });
  if (has_more_findings(report)) {
    sections.add("all-findings", "All findings", [&](Markup& html) { write_finding_table(html, report.findings); });
  }
  sections.add("baseline", "Baseline", [&](Markup& html) {
    write_facts(html, report.baseline);
    write_known_table(html, report);
  });
  sections.add("contents", "Recorded", [&](Markup& html) { write_facts(html, report.contents); });
  sections.add("run", "Run", [&](Markup& html) { write_facts(html, report.run); });
  return sections;
}

void write_document(const PageReport& report, std::ostream& out) {
  Markup html(out);
  html.verbatim("<!DOCTYPE html>\n");
  const Tag document(html, "html", {{"lang", "en"}});
  {
    const Tag head(html, "head");
    html.empty("meta", {{"charset", "utf-8"}});
    html.empty("meta", {{"http-equiv", "Content-Security-Policy"}, {"content", policy()}});
    html.empty("meta", {{"name", "viewport"}, {"content", "width=device-width, initial-scale=1"}});
    html.empty("meta", {{"name", "color-scheme"}, {"content", "light dark"}});
    html.empty("meta", {{"name", "referrer"}, {"content", "no-referrer"}});
    html.empty("link", {{"rel", "icon"}, {"href", kIcon}});
    html.element("title", {}, fmt::format("gradclip {} {}", report.command, report.dump.path));
    const Tag style(html, "style");
    html.verbatim(kPageStyle);
  }
  const Tag body(html, "body");
  const Sections sections = sections_of(report);
  write_header(html, report);
  write_tiles(html, tiles_of(report));
  sections.write_contents(html);
  {
    const Tag main(html, "main");
    sections.write(html);
  }
  html.element("footer", {},
               fmt::format("Made by gradclip {} from a report of version {}. The JSON report has every number.",
                           report.command, kReportVersion));
  html.element("div", {{"id", "tip"}, {"role", "status"}, {"hidden", "hidden"}}, "");
  const Tag script(html, "script");
  html.verbatim(kPageScript);
}

void write_page(const PageReport& report, std::ostream& out) {
  // Elements are closed by destructors, which must not throw as a stream to a full disk does.
  std::ostringstream page;
  write_document(report, page);
  if (!page) throw std::bad_alloc();
  out << std::move(page).str();
}
}  // namespace

void write_html(std::string_view json, const std::string& where, std::ostream& out) {
  write_page(read_page_report(json, where), out);
}

void write_html(const Report& report, std::ostream& out) {
  std::ostringstream json;
  write_json(report, json);
  write_html(std::move(json).str(), "report", out);
}

}  // namespace gradclip
