// What reduce.h says in addition to the arithmetic of numbers: NaN and zeros, complex products,
// division, which pairs exist, and how the instruction set is chosen.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <complex>
#include <limits>
#include <string>

#include "tests/cpp/kernels/kernels_cases.h"
#include "tests/cpp/support/check.h"

namespace pycoll {
namespace {

using kernels::Isa;

std::vector<Isa> every_isa() {
  std::vector<Isa> all = testing::fast_isas();
  all.push_back(Isa::kReference);
  return all;
}

template <typename T>
T reduce(DType dtype, ReduceOp op, Isa isa, T a, T b) {
  const void* sources[] = {&a, &b};
  T result;
  kernels::combine_for(dtype, op, isa).function(&result, sources, 2, 1, nullptr);
  return result;
}

// One page between two that may not be touched.
class FencedPage {
 public:
  FencedPage() : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    void* all = mmap(nullptr, 3 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED, "mmap of %zu bytes", 3 * page_);
    start_ = static_cast<unsigned char*>(all) + page_;
    CHECK(mprotect(start_, page_, PROT_READ | PROT_WRITE) == 0, "mprotect");
  }
  ~FencedPage() { munmap(start_ - page_, 3 * page_); }
  FencedPage(const FencedPage&) = delete;
  FencedPage& operator=(const FencedPage&) = delete;

  unsigned char* front() { return start_; }
  unsigned char* back(std::size_t bytes) { return start_ + page_ - bytes; }

 private:
  std::size_t page_;
  unsigned char* start_;
};

// A kernel that reads or writes one byte too many dies here.
TEST(no_kernel_touches_memory_outside_its_arrays) {
  FencedPage pages[kernels::kSourcesMax];
  for (const Isa isa : every_isa()) {
    for (const DType dtype : testing::all_dtypes()) {
      for (const std::size_t count : {1, 2, 3, 5, 15, 17, 31, 63, 65, 127, 129, 255}) {
        const std::size_t bytes = count * item_bytes(dtype);
        const void* fronts[kernels::kSourcesMax];
        const void* backs[kernels::kSourcesMax];
        for (int k = 0; k < kernels::kSourcesMax; ++k) {
          fronts[k] = pages[k].front();
          backs[k] = pages[k].back(bytes);
        }
        for (const ReduceOp op : testing::all_ops()) {
          const kernels::Combine combine = kernels::combine_for(dtype, op, isa);
          if (!combine) continue;
          for (int sources = 2; sources <= kernels::kSourcesMax; ++sources) {
            combine.function(pages[0].front(), fronts, sources, count, nullptr);
            combine.function(pages[0].back(bytes), backs, sources, count, nullptr);
          }
        }
        const kernels::ScaleFunction scale = kernels::scale_for(dtype, isa);
        if (scale == nullptr) continue;
        scale(pages[0].front(), count, 3);
        scale(pages[0].back(bytes), count, 3);
      }
    }
  }
}

struct RealType {
  DType dtype;
  std::uint64_t nan;       // the canonical one
  std::uint64_t infinity;  // of e4m3: the largest number
};

constexpr RealType kRealTypes[] = {
    {DType::kFloat16, 0x7e00, 0x7c00},
    {DType::kBFloat16, 0x7fc0, 0x7f80},
    {DType::kFloat32, 0x7fc00000, 0x7f800000},
    {DType::kFloat64, 0x7ff8000000000000, 0x7ff0000000000000},
    {DType::kFloat8E4M3, 0x7f, 0x7e},
    {DType::kFloat8E5M2, 0x7e, 0x7c},
};

// Little-endian: the low bytes of a word are the element.
std::uint64_t reduce_word(DType dtype, ReduceOp op, Isa isa, std::uint64_t a, std::uint64_t b) {
  const void* sources[] = {&a, &b};
  std::uint64_t result = 0;
  kernels::combine_for(dtype, op, isa).function(&result, sources, 2, 1, nullptr);
  return result;
}

void check_word(const RealType& type, ReduceOp op, Isa isa, std::uint64_t a, std::uint64_t b,
                std::uint64_t expected) {
  const std::uint64_t got = reduce_word(type.dtype, op, isa, a, b);
  CHECK(got == expected, "%s %s on %s: 0x%llx, 0x%llx gives 0x%llx, expected 0x%llx",
        name_of(type.dtype).data(), name_of(op).data(), kernels::name_of(isa).data(),
        static_cast<unsigned long long>(a), static_cast<unsigned long long>(b),
        static_cast<unsigned long long>(got), static_cast<unsigned long long>(expected));
}

TEST(every_nan_is_stored_as_the_canonical_one) {
  for (const Isa isa : every_isa()) {
    for (const RealType& type : kRealTypes) {
      const std::uint64_t sign = 1ULL << (8 * item_bytes(type.dtype) - 1);
      const std::uint64_t nans[] = {type.infinity + 1, type.nan, sign - 1};
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax}) {
        for (const std::uint64_t nan : nans) {
          for (const std::uint64_t other : {std::uint64_t{0}, sign, type.infinity, sign - 1}) {
            check_word(type, op, isa, nan, other, type.nan);
            check_word(type, op, isa, other | sign, nan | sign, type.nan);
          }
        }
      }
      if (type.dtype == DType::kFloat8E4M3) continue;
      check_word(type, ReduceOp::kSum, isa, type.infinity, type.infinity | sign, type.nan);
      check_word(type, ReduceOp::kProd, isa, 0, type.infinity, type.nan);
    }
  }
}

TEST(minus_zero_is_less_than_zero_in_either_order) {
  for (const Isa isa : every_isa()) {
    for (const RealType& type : kRealTypes) {
      const std::uint64_t minus = 1ULL << (8 * item_bytes(type.dtype) - 1);
      check_word(type, ReduceOp::kMin, isa, 0, minus, minus);
      check_word(type, ReduceOp::kMin, isa, minus, 0, minus);
      check_word(type, ReduceOp::kMax, isa, 0, minus, 0);
      check_word(type, ReduceOp::kMax, isa, minus, 0, 0);
      check_word(type, ReduceOp::kMax, isa, minus, minus, minus);
      check_word(type, ReduceOp::kSum, isa, minus, minus, minus);
    }
  }
}

template <typename T>
void check_complex(DType dtype, Isa isa) {
  using C = std::complex<T>;
  const auto get = [&](C a, C b) { return reduce<C>(dtype, ReduceOp::kProd, isa, a, b); };
  CHECK(get({1, 2}, {3, 4}) == C(-5, 10), "%s: (1+2i)(3+4i)", name_of(dtype).data());
  // (1+e)(1-e) - 1 = -e^2 is lost when the product is rounded, kept by a fused multiply-add.
  const T e = std::numeric_limits<T>::epsilon();
  CHECK(get({1 + e, 1}, {1 - e, 1}) == C(0, (1 + e) + (1 - e)), "%s: contracted",
        name_of(dtype).data());
  // No recovery of infinities: inf * 0 is NaN.
  const C recovered = get({std::numeric_limits<T>::infinity(), 0}, {1, 0});
  CHECK(recovered.real() == std::numeric_limits<T>::infinity() && std::isnan(recovered.imag()) &&
            !std::signbit(recovered.imag()),
        "%s: (inf+0i)(1+0i) is (%g, %g)", name_of(dtype).data(),
        static_cast<double>(recovered.real()), static_cast<double>(recovered.imag()));
}

TEST(complex_products_are_the_textbook_formula) {
  for (const Isa isa : every_isa()) {
    check_complex<float>(DType::kComplex64, isa);
    check_complex<double>(DType::kComplex128, isa);
  }
}

TEST(scaling_rounds_once) {
  for (const Isa isa : every_isa()) {
    float reals[] = {1.0f, -10.0f};
    kernels::scale_for(DType::kFloat32, isa)(reals, 2, 3);
    CHECK(reals[0] == 1.0f / 3.0f && reals[1] == -10.0f / 3.0f, "float32 / 3");
    for (const DType dtype : {DType::kBool, DType::kInt8, DType::kUInt64, DType::kBFloat16}) {
      CHECK(kernels::scale_for(dtype, isa) == nullptr, "%s is divided", name_of(dtype).data());
    }
  }
}

TEST(only_meaningful_pairs_have_kernels) {
  int pairs = 0;
  for (const DType dtype : testing::all_dtypes()) {
    CHECK(kernels::defined(dtype, ReduceOp::kUser), "user");
    for (const ReduceOp op : testing::all_ops()) {
      const bool present = static_cast<bool>(kernels::combine_for(dtype, op, Isa::kPortable));
      CHECK(present == (kernels::defined(dtype, op) && op < ReduceOp::kUser), "%s %s",
            name_of(dtype).data(), name_of(op).data());
      pairs += present ? 1 : 0;
    }
  }
  // 17 types with sum, prod, avg; 15 with min, max; 9 with three bitwise operations.
  CHECK(pairs == 17 * 3 + 15 * 2 + 9 * 3, "%d pairs", pairs);
}

// best_isa() is fixed at the first call, so each case asks in a process of its own.
struct IsaChoice {
  int isa;
  std::string text;
};

IsaChoice choose(const char* wanted) {
  int ends[2];
  CHECK(pipe(ends) == 0, "pipe");
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    setenv("PYCOLL_ISA", wanted, 1);
    _exit(static_cast<int>(kernels::best_isa()));
  }
  close(ends[1]);
  std::string text;
  char buffer[256];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status), "child status %d", status);
  return {WEXITSTATUS(status), text};
}

TEST(the_environment_chooses_the_instruction_set) {
  const std::vector<Isa> fast = testing::fast_isas();
  const int best = static_cast<int>(fast.back());
  for (int i = 0; i <= static_cast<int>(Isa::kAvx512Fp16); ++i) {
    const auto isa = static_cast<Isa>(i);
    const IsaChoice choice = choose(kernels::name_of(isa).data());
    const bool usable = kernels::available(isa);
    CHECK(choice.isa == (usable ? i : best), "%s gives %d", kernels::name_of(isa).data(),
          choice.isa);
    CHECK(choice.text.empty() == usable, "%s says: %s", kernels::name_of(isa).data(),
          choice.text.c_str());
  }
  const IsaChoice none = choose("");
  CHECK(none.isa == best && none.text.empty(), "no wish gives %d, %s", none.isa, none.text.c_str());
  const IsaChoice unknown = choose("sse9");
  CHECK(unknown.isa == best, "unknown gives %d", unknown.isa);
  CHECK(unknown.text.find("PYCOLL_ISA=sse9") != std::string::npos &&
            unknown.text.find("avx512") != std::string::npos,
        "unknown says: %s", unknown.text.c_str());
}

}  // namespace
}  // namespace pycoll

RUN_TESTS()
