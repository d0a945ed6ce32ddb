#pragma once
// The entries of "parameters", read one by one while the document is parsed. Inside this room.

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradclip/base/error.hpp"
#include "gradclip/dump/json_document.hpp"
#include "gradclip/dump/manifest.hpp"

namespace gradclip {

inline constexpr std::int64_t kMaxWorldSize = std::int64_t{1} << 24;

/// Positions in Manifest::meshes by name.
using MeshIndices = std::unordered_map<std::string, std::size_t>;

/// Errors: Error(bad_input) at `field`, with some names that would do.
[[nodiscard]] std::size_t mesh_index(const Manifest& manifest, const MeshIndices& indices, const std::string& key,
                                     const JsonField& field);

/// A type that gradients are added in, at the member `key`; empty if it is missing or null. Errors: Error(bad_input).
[[nodiscard]] std::optional<DType> parse_sum_type(const JsonField& object, const char* key);

/// What another room refuses, with the place in the document before it.
template <class Function>
auto located(const JsonField& field, Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error& error) {
    ErrorText text = error.text();
    text.where = text.where.empty() ? field.where() : field.where() + ": " + text.where;
    throw Error(error.code(), std::move(text), error.location());
  }
}

/// Entries are complete only when the rest of the document is known, which may come before or after them.
class ParameterParser {
 public:
  /// Appends to manifest.parameters.
  /// @param problems  null: the first one is thrown. Else all are collected there, nothing is thrown, and finish()
  /// moves
  ///                  the entries that are wrong to manifest.refused.
  ParameterParser(Manifest& manifest, const std::string& where, std::vector<ErrorText>* problems)
      : manifest_(manifest), where_(where), problems_(problems) {}

  /// Never throws an Error: another format's or version's parameters may look different, so what is wrong with one is
  /// said by finish(), when the head of the document was checked.
  void take(std::size_t index, const nlohmann::json& value);

  /// Meshes, ranks and world size; no two entries may mean the same dataset of the same rank.
  /// @param refused_meshes  names of meshes that are wrong themselves: their parameters are no problems of their own
  void finish(const MeshIndices& mesh_indices, const std::set<std::string>& refused_meshes);

  /// What was wrong with an entry, if anything.
  void rethrow() const {
    if (first_error_) std::rethrow_exception(first_error_);
  }

 private:
  /// What an entry's check still needs when the rest of the document is known.
  struct Pending {
    std::size_t mesh;  // index into mesh_names_, or kNoMesh
    bool has_ranks;
    bool refused = false;  // an entry that only keeps its place and its name
  };

  void take_checked(std::size_t index, const nlohmann::json& value);
  std::vector<Placement> parse_placements(const JsonField& field, const ParameterEntry& entry);
  const Placement& parse_one(const JsonField& field, std::size_t dimensions);
  std::size_t intern(const std::string& mesh);
  void finish_parameter(std::size_t index, const MeshIndices& mesh_indices);
  void finish_plain(const JsonField& field, const ParameterEntry& entry) const;
  void finish_on_mesh(const JsonField& field, ParameterEntry& entry, const Pending& pending) const;
  void check_flat(const JsonField& field, const ParameterEntry& entry, const DeviceMesh& mesh) const;
  void check_rank(const JsonField& field, std::int32_t rank) const;
  /// Whether there was no problem; an entry with one is refused.
  template <class Function>
  bool attempt(std::size_t index, const Function& function);
  /// Nor the same name in a rank file's lists: one's "dataset" may be another's name, whose dataset is written
  /// otherwise.
  void refuse_shared_datasets();
  template <class Key>
  void refuse_shared(const Key& key);
  void refuse_shared_ranks(const std::vector<std::size_t>& entries, std::set<std::vector<std::size_t>>& disjoint);
  void take_ranks(std::size_t index, std::unordered_map<std::int32_t, std::size_t>& holder) const;
  void leave_out_refused();

  Manifest& manifest_;
  const std::string& where_;
  std::vector<ErrorText>* problems_;
  std::exception_ptr first_error_;
  std::vector<Pending> pending_;
  std::vector<std::string> mesh_names_;  // as parameters name them
  std::unordered_map<std::string, std::size_t> mesh_name_indices_;
  std::map<std::size_t, std::unordered_map<std::string, Placement>> placements_;  // by tensor dimensions, by text
};

}  // namespace gradclip
