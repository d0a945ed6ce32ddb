#include "nccl_reduction.hpp"

#include <cstdint>
#include <cstring>

namespace emulation {
namespace {

template <class Value>
Value reduced(Value a, Value b, ncclRedOp_t reduction) {
  switch (reduction) {
    case ncclSum:
      return static_cast<Value>(a + b);
    case ncclProd:
      return static_cast<Value>(a * b);
    case ncclMax:
      return a < b ? b : a;
    default:
      return b < a ? b : a;
  }
}

template <class Value>
void reduce(std::byte* into, const std::byte* from, std::size_t count, ncclRedOp_t reduction) {
  for (std::size_t i = 0; i < count; ++i) {
    Value a, b;
    std::memcpy(&a, into + i * sizeof a, sizeof a);
    std::memcpy(&b, from + i * sizeof b, sizeof b);
    a = reduced(a, b, reduction);
    std::memcpy(into + i * sizeof a, &a, sizeof a);
  }
}

}  // namespace

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

bool can_reduce(ncclDataType_t type, ncclRedOp_t reduction) {
  const bool known = size_of(type) >= 4 || type == ncclInt8 || type == ncclUint8;
  return known && (reduction == ncclSum || reduction == ncclProd || reduction == ncclMax || reduction == ncclMin);
}

void reduce_into(std::byte* into, const std::byte* from, std::size_t count, ncclDataType_t type,
                 ncclRedOp_t reduction) {
  switch (type) {
    case ncclInt8:
      return reduce<std::int8_t>(into, from, count, reduction);
    case ncclUint8:
      return reduce<std::uint8_t>(into, from, count, reduction);
    case ncclInt32:
      return reduce<std::int32_t>(into, from, count, reduction);
    case ncclUint32:
      return reduce<std::uint32_t>(into, from, count, reduction);
    case ncclInt64:
      return reduce<std::int64_t>(into, from, count, reduction);
    case ncclUint64:
      return reduce<std::uint64_t>(into, from, count, reduction);
    case ncclFloat32:
      return reduce<float>(into, from, count, reduction);
    default:
      return reduce<double>(into, from, count, reduction);
  }
}

}  // namespace emulation
