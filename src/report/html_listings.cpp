#include "gradclip/report/html_listings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "gradclip/report/html_axes.hpp"
#include "gradclip/report/html_figures.hpp"
#include "gradclip/report/html_table.hpp"
#include "gradclip/report/text.hpp"
#include "gradclip/report/text_pieces.hpp"

namespace gradclip {
namespace {

constexpr std::size_t kMostTotals = 16;
constexpr std::size_t kMostParts = 40;

std::string remarks(const PageParameter& parameter) {
  return comma_separated({parameter.expert ? "expert" : "", parameter.counted ? "" : "tied, counted elsewhere",
                          parameter.gradient_placements.empty() ? "" : "gradient " + parameter.gradient_placements,
                          parameter.first_nonfinite.empty() ? "" : "first non-finite " + parameter.first_nonfinite});
}

}  // namespace

void write_seen_totals(Markup& html, const PageReport& report) {
  if (report.totals.empty()) return;
  {
    const Tag scroll(html, "div",
                     {{"class", "scroll"}, {"tabindex", "0"}, {"role", "region"}, {"aria-label", "totals by rank"}});
    const Tag table(html, "table", {{"class", "plain"}});
    html.element("caption", {},
                 fmt::format("Totals that recorded ranks would have used, in {} arithmetic{}{}", report.arithmetic,
                             report.note.empty() ? "" : ": ", report.note));
    {
      const Tag head(html, "thead");
      const Tag row(html, "tr");
      html.element("th", {{"scope", "col"}, {"class", "n"}}, "total");
      html.element("th", {{"scope", "col"}, {"class", "n"}}, "from the exact");
      html.element("th", {{"scope", "col"}, {"class", "n"}}, "coefficient");
      html.element("th", {{"scope", "col"}}, "ranks");
    }
    const Tag body(html, "tbody");
    for (std::size_t i = 0; i < std::min(report.totals.size(), kMostTotals); ++i) {
      const PageReferenceTotal& seen = report.totals[i];
      const double exact = report.total.value_or(seen.total);
      const Tag row(html, "tr");
      html.element("td", {{"class", "n"}}, exact_number(seen.total));
      html.element("td", {{"class", "n"}},
                   seen.total == exact ? "equal"
                   : std::isfinite(seen.total) && std::isfinite(exact) && exact != 0.0
                       ? fmt::format("{:+.3g} %", 100.0 * (seen.total - exact) / exact)
                       : "");
      html.element("td", {{"class", "n"}}, seen.coefficient ? exact_number(*seen.coefficient) : "");
      html.element("td", {}, fmt::format("{}: {}", counted(seen.ranks.size(), "rank", "ranks"), rank_list(seen.ranks)));
    }
  }
  if (report.totals.size() > kMostTotals) {
    html.element("p", {{"class", "note"}},
                 fmt::format("and {} more totals", grouped(report.totals.size() - kMostTotals)));
  }
  write_rank_totals(html, report);
}

void write_parts(Markup& html, const PageParts& parts) {
  const Tag scroll(html, "div",
                   {{"class", "scroll"}, {"tabindex", "0"}, {"role", "region"}, {"aria-label", parts.title}});
  const Tag table(html, "table", {{"class", "plain"}});
  html.element("caption", {}, "By " + parts.title);
  {
    const Tag head(html, "thead");
    const Tag row(html, "tr");
    html.element("th", {{"scope", "col"}}, parts.title);
    for (const char* label : {"norm", "share", "parameters", "elements"}) {
      html.element("th", {{"scope", "col"}, {"class", "n"}}, label);
    }
  }
  const Tag body(html, "tbody");
  for (std::size_t i = 0; i < std::min(parts.parts.size(), kMostParts); ++i) {
    const PagePart& part = parts.parts[i];
    const Tag row(html, "tr");
    {
      const Tag name(html, "th", {{"scope", "row"}});
      html.element("bdi", {}, part.name);
    }
    html.element("td", {{"class", "n"}}, part.norm ? short_number(*part.norm) : "");
    html.element("td", {{"class", "n"}}, part.share ? percentage(*part.share) : "");
    html.element("td", {{"class", "n"}}, grouped(part.parameters));
    html.element("td", {{"class", "n"}}, grouped(part.elements));
  }
  if (parts.parts.size() > kMostParts) {
    const Tag row(html, "tr");
    html.element("td", {{"colspan", "5"}}, fmt::format("and {} more", grouped(parts.parts.size() - kMostParts)));
  }
}

void write_finding_table(Markup& html, const std::vector<Finding>& findings) {
  if (findings.empty()) return;
  using Kind = TableData::Kind;
  TableData table("findings");
  table.column("kind", Kind::text);
  table.column("parameter", Kind::name);
  table.column("ranks", Kind::text, "recorded ranks");
  table.column("index", Kind::text, "global");
  table.column("value", Kind::number);
  table.column("message", Kind::text);
  for (const Finding& finding : findings) {
    table.row()
        .cell(finding.kind)
        .cell(finding.parameter)
        .cell(rank_list(finding.ranks))
        .cell(finding.index ? index_text(*finding.index) : "")
        .cell(finding.value)
        .cell(finding.message);
  }
  table.write(html);
}

void write_parameter_table(Markup& html, const PageReport& report) {
  if (report.parameters.empty() || !report.tensors.empty()) return;
  using Kind = TableData::Kind;
  TableData table("parameters");
  table.column("parameter", Kind::name);
  table.column("norm", Kind::number);
  table.column("share", Kind::share, "of the total: norm^p / total^p");
  table.column("largest", Kind::number, "largest finite magnitude");
  table.column("smallest", Kind::number, "smallest finite magnitude above 0");
  table.column("mean", Kind::number);
  table.column("zeros", Kind::count);
  table.column("subnormal", Kind::count, "of the gradient's own type");
  table.column("NaN", Kind::count);
  table.column("infinite", Kind::count);
  table.column("elements", Kind::count, "that count");
  table.column("shape", Kind::text);
  table.column("type", Kind::text);
  table.column("sharding", Kind::text, "mesh and placements");
  table.column("remarks", Kind::text);
  const auto if_measured = [](const PageParameter& parameter, std::uint64_t count) {
    return parameter.norm ? std::optional(count) : std::nullopt;
  };
  for (const PageParameter& parameter : report.parameters) {
    table.row()
        .cell(parameter.name)
        .cell(parameter.norm)
        .cell(parameter.share)
        .cell(parameter.max_abs)
        .cell(parameter.min_abs)
        .cell(parameter.mean)
        .cell(parameter.zeros)
        .cell(parameter.subnormals)
        .cell(if_measured(parameter, parameter.nan))
        .cell(if_measured(parameter, parameter.posinf + parameter.neginf))
        .cell(parameter.elements)
        .cell(parameter.shape)
        .cell(parameter.dtype)
        .cell(parameter.mesh.empty() ? "plain" : fmt::format("{} [{}]", parameter.mesh, parameter.placements))
        .cell(remarks(parameter));
  }
  table.write(html);
}

void write_difference_table(Markup& html, const PageReport& report) {
  if (report.differences.empty()) return;
  using Kind = TableData::Kind;
  TableData table("parameters");
  table.column("parameter", Kind::name);
  table.column("status", Kind::status);
  table.column("differ", Kind::count, "elements that are not equal by the rule");
  table.column("NaN differ", Kind::count, "of them with a NaN on either side");
  table.column("relative L2", Kind::number, "norm of A - B over norm of B");
  table.column("in epsilons", Kind::number, "of the narrower type");
  table.column("largest |a − b|", Kind::number);
  table.column("at", Kind::text, "global index of it");
  table.column("largest relative", Kind::number, "|a - b| / |b|");
  table.column("cosine", Kind::number, "of A and B");
  table.column("‖A‖ / ‖B‖", Kind::number);
  table.column("first", Kind::text, "global index of the first that differs");
  table.column("elements", Kind::count);
  table.column("shape", Kind::text);
  table.column("type", Kind::text, "A / B where they differ");
  table.column("name in B", Kind::name);
  for (const PageDifference& parameter : report.differences) {
    const auto if_compared = [&](std::uint64_t count) {
      return parameter.elements ? std::optional(count) : std::nullopt;
    };
    table.row()
        .cell(parameter.name)
        .cell(parameter.status)
        .cell(if_compared(parameter.different))
        .cell(if_compared(parameter.nan_different))
        .cell(parameter.relative_l2)
        .cell(parameter.relative_l2_epsilons)
        .cell(parameter.max_abs)
        .cell(parameter.max_abs_index)
        .cell(parameter.max_rel)
        .cell(parameter.cosine)
        .cell(parameter.norm_ratio)
        .cell(parameter.first_different)
        .cell(parameter.elements)
        .cell(parameter.shape)
        .cell(parameter.dtype)
        .cell(parameter.name_in_other);
  }
  table.write(html);
}

void write_item_table(Markup& html, const PageReport& report) {
  if (report.items.empty()) return;
  using Kind = TableData::Kind;
  TableData table("items");
  table.column("parameter", Kind::name);
  table.column("item", Kind::text);
  table.column("status", Kind::status);
  table.column("expected", Kind::number, "by the baseline");
  table.column("found", Kind::number);
  table.column("deviation", Kind::number, "|found - expected| / |expected|");
  table.column("allowed", Kind::number, "the largest |found - expected| that passes");
  for (const PageItem& item : report.items) {
    table.row()
        .cell(item.parameter.empty() ? "(whole model)" : item.parameter)
        .cell(item.item)
        .cell(item.status)
        .cell(item.expected)
        .cell(item.found)
        .cell(item.deviation)
        .cell(item.allowed);
  }
  table.write(html);
}

void write_known_table(Markup& html, const PageReport& report) {
  if (report.known.empty()) return;
  TableData table("known");
  table.column("kind", TableData::Kind::text);
  table.column("parameter", TableData::Kind::name);
  table.column("in this dump", TableData::Kind::text);
  for (const PageKnown& known : report.known) {
    table.row().cell(known.kind).cell(known.parameter).cell(known.seen ? "yes" : "gone");
  }
  html.element("h3", {}, "Known findings");
  table.write(html);
}

void write_worst_table(Markup& html, const PageReport& report) {
  if (report.worst.empty()) return;
  using Kind = TableData::Kind;
  TableData table("elements");
  table.column("parameter", Kind::name);
  table.column("index", Kind::text, "global");
  table.column("A", Kind::number);
  table.column("B", Kind::number);
  table.column("|A − B|", Kind::number);
  for (const PageElement& element : report.worst) {
    table.row()
        .cell(report.differences[element.parameter].name)
        .cell(element.index)
        .cell(element.a)
        .cell(element.b)
        .cell(std::abs(element.a - element.b));
  }
  table.write(html);
}

void write_step_table(Markup& html, const PageReport& report) {
  if (report.steps.empty()) return;
  using Kind = TableData::Kind;
  TableData table("steps");
  table.column("dump", Kind::name);
  table.column("step", Kind::count, "as recorded");
  table.column("total norm", Kind::number);
  table.column("p", Kind::number, "type of the norm");
  table.column("findings", Kind::count, "about this dump");
  for (const PageStep& step : report.steps) {
    table.row().cell(step.path);
    if (step.step && *step.step < 0) {
      table.cell(fmt::to_string(*step.step));
    } else {
      table.cell(step.step ? std::optional(static_cast<std::uint64_t>(*step.step)) : std::nullopt);
    }
    table.cell(step.total).cell(step.type).cell(step.findings);
  }
  table.write(html);
}

void write_sweep_table(Markup& html, const PageReport& report) {
  if (report.sweep.empty()) return;
  using Kind = TableData::Kind;
  TableData table("limits");
  table.column("max norm", Kind::number);
  table.column("clipped", Kind::count, "steps with a coefficient below 1");
  table.column("steps", Kind::count, "with a finite total");
  table.column("least coefficient", Kind::number);
  table.column("median", Kind::number, "of the coefficients, 1 where nothing is clipped");
  table.column("mean", Kind::number, "of the coefficients");
  for (const PageSweepLine& line : report.sweep) {
    table.row()
        .cell(line.max_norm)
        .cell(line.clipped)
        .cell(line.steps)
        .cell(line.least)
        .cell(line.median)
        .cell(line.mean);
  }
  table.write(html);
}

}  // namespace gradclip
