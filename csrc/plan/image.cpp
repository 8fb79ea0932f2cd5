#include "plan/image.h"

#include <cstring>

#include "base/bytes.h"
#include "plan/layout.h"
#include "plan/validate.h"

namespace pycoll::plan {

Status Image::load(std::span<const std::byte> bytes, std::shared_ptr<const Image>* image) {
  std::shared_ptr<Image> made(new Image());
  made->words_.resize(div_ceil(bytes.size(), sizeof(std::uint64_t)));
  if (!bytes.empty()) std::memcpy(made->words_.data(), bytes.data(), bytes.size());
  const auto* start = reinterpret_cast<const std::byte*>(made->words_.data());
  Status status = validate({start, bytes.size()}, &made->plan_);
  if (!status.ok()) return status;
  made->direct_writes_ = direct_writes_of(made->plan_);
  made->leading_rows_ = count_leading_rows(made->plan_);
  *image = std::move(made);
  return status;
}

bool Image::holds_input(std::uint32_t block) const { return plan::holds_input(header(), block); }
bool Image::holds_output(std::uint32_t block) const { return plan::holds_output(header(), block); }
std::uint32_t Image::output_group(std::uint32_t block) const {
  return plan::output_group(header(), block);
}
std::uint32_t Image::contributors() const { return workers(header()); }
bool Image::alternates() const { return header().servers == 0; }

}  // namespace pycoll::plan
