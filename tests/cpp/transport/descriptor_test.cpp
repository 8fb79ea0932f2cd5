#include "tests/cpp/support/check.h"
#include "transport/transport.h"

using namespace pycoll;
using transport::Descriptor;

TEST(texts_name_what_ranks_must_agree_on) {
  struct Example {
    Descriptor descriptor;
    const char* text;
  };
  const Example examples[] = {
      {{1024, 1, 0, Collective::kAllReduce, DType::kFloat32, ReduceOp::kSum, 0},
       "all_reduce of 1024 float32, op sum"},
      {{0, 1, 0, Collective::kAllReduce, DType::kInt8, ReduceOp::kMax, 0},
       "all_reduce of 0 int8, op max"},
      {{7, 1, 3, Collective::kReduce, DType::kFloat64, ReduceOp::kUser, 0},
       "reduce of 7 float64, root 3, op user"},
      {{9, 1, 2, Collective::kBroadcast, DType::kBool, ReduceOp::kSum, 0},
       "broadcast of 9 bool, root 2"},
      {{0, 1, 0, Collective::kAllGather, DType::kBFloat16, ReduceOp::kSum, 0},
       "all_gather of bfloat16"},
      {{5, 1, 0, Collective::kAllToAll, DType::kInt64, ReduceOp::kSum, 0}, "all_to_all of 5 int64"},
      {{0, 1, 1, Collective::kGather, DType::kInt64, ReduceOp::kSum, 0}, "gather of int64, root 1"},
      {{4, 1, 0, Collective::kExscan, DType::kUInt8, ReduceOp::kBxor, 0},
       "exscan of 4 uint8, op bxor"},
      {{0, 1, 0, Collective::kBarrier, DType::kUInt8, ReduceOp::kSum, 0}, "barrier"},
  };
  for (const Example& example : examples) {
    const std::string text = transport::to_text(example.descriptor);
    CHECK(text == example.text, "got '%s', expected '%s'", text.c_str(), example.text);
  }
}

RUN_TESTS()
