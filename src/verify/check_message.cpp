#include "gradclip/verify/check_message.hpp"

namespace gradclip {
namespace {

void put_names(std::string& to, const std::vector<ShardName>& names) {
  put(to, static_cast<std::int64_t>(names.size()));
  for (const ShardName& name : names) put(to, std::int64_t{name.parameter});
}

/// Reads of one rank's check, with every number in the manifest's range.
class ReplyTaker {
 public:
  ReplyTaker(std::string_view bytes, const Manifest& manifest, std::int32_t rank)
      : taker_(bytes), manifest_(manifest), rank_(rank) {}

  CheckReply take() {
    CheckReply reply;
    const std::int64_t code = taker_.number();
    if (code != 0) {
      reply.code = code == static_cast<std::int64_t>(ExitCode::resources)   ? ExitCode::resources
                   : code == static_cast<std::int64_t>(ExitCode::bad_input) ? ExitCode::bad_input
                                                                            : ExitCode::bug;
      for (std::string* part : {&reply.error.where, &reply.error.found, &reply.error.expected, &reply.error.advice}) {
        *part = taker_.text();
      }
    } else {
      take_check(reply.check);
    }
    require(taker_.done());
    return reply;
  }

 private:
  static void require(bool holds) { GRADCLIP_CHECK(holds, "another process sent no result of a check"); }

  void take_check(RankCheck& check) {
    for (std::int64_t left = taker_.number(); left > 0; --left) {
      Fault& fault = check.faults.emplace_back(take_fault(taker_));
      require(fault.rank == rank_ && (!fault.parameter || *fault.parameter < manifest_.parameters.size()));
    }
    check.missing = taker_.number() != 0;
    check.readable = taker_.number() != 0;
    take_names(check.unusable);
    for (std::int64_t left = taker_.number(); left > 0; --left) {
      const std::uint32_t parameter = take_parameter();
      check.odd.push_back({parameter, rank_, static_cast<std::uint64_t>(taker_.number())});
    }
    take_names(check.none);
    check.file_checksum = taker_.number() != 0;
    check.file_compared = taker_.number() != 0;
    check.shards = static_cast<std::uint64_t>(taker_.number());
    check.shard_checksums = static_cast<std::uint64_t>(taker_.number());
  }

  std::uint32_t take_parameter() {
    const std::int64_t parameter = taker_.number();
    require(parameter >= 0 && static_cast<std::uint64_t>(parameter) < manifest_.parameters.size() &&
            manifest_.holds(manifest_.parameters[static_cast<std::size_t>(parameter)], rank_));
    return static_cast<std::uint32_t>(parameter);
  }

  void take_names(std::vector<ShardName>& names) {
    for (std::int64_t left = taker_.number(); left > 0; --left) names.push_back({take_parameter(), rank_});
  }

  Taker taker_;
  const Manifest& manifest_;
  std::int32_t rank_;
};

}  // namespace

void put(std::string& to, const Fault& fault) {
  put(to, fault.kind);
  put(to, std::int64_t{fault.rank});
  put(to, fault.parameter ? static_cast<std::int64_t>(*fault.parameter) : std::int64_t{-1});
  put(to, fault.name);
  put(to, fault.message);
}

Fault take_fault(Taker& taker) {
  Fault fault;
  fault.kind = taker.text();
  fault.rank = static_cast<std::int32_t>(taker.number());
  if (const std::int64_t parameter = taker.number(); parameter >= 0) {
    fault.parameter = static_cast<std::size_t>(parameter);
  }
  fault.name = taker.text();
  fault.message = taker.text();
  return fault;
}

std::string packed(const CheckReply& reply) {
  std::string bytes;
  put(bytes, static_cast<std::int64_t>(reply.code));
  if (reply.code != ExitCode::done) {
    for (const std::string* part :
         {&reply.error.where, &reply.error.found, &reply.error.expected, &reply.error.advice}) {
      put(bytes, *part);
    }
    return bytes;
  }
  const RankCheck& check = reply.check;
  put(bytes, static_cast<std::int64_t>(check.faults.size()));
  for (const Fault& fault : check.faults) put(bytes, fault);
  put(bytes, std::int64_t{check.missing});
  put(bytes, std::int64_t{check.readable});
  put_names(bytes, check.unusable);
  put(bytes, static_cast<std::int64_t>(check.odd.size()));
  for (const OddShard& shard : check.odd) {
    put(bytes, std::int64_t{shard.parameter});
    put(bytes, static_cast<std::int64_t>(shard.elements));
  }
  put_names(bytes, check.none);
  put(bytes, std::int64_t{check.file_checksum});
  put(bytes, std::int64_t{check.file_compared});
  put(bytes, static_cast<std::int64_t>(check.shards));
  put(bytes, static_cast<std::int64_t>(check.shard_checksums));
  return bytes;
}

std::optional<CheckReply> unpacked_reply(std::string_view bytes, const Manifest& manifest, std::int32_t rank) {
  try {
    return ReplyTaker(bytes, manifest, rank).take();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace gradclip
