// A device of torch that behaves like one GPU and computes on the CPU: the backend `PrivateUse1`.
//
// Its tensors have memory of their own, so one of them beside a CPU tensor is an error, as with CUDA. Each
// operation without a kernel here runs its CPU kernel on the same memory. Kernels, copies, synchronisations of
// the host, and bytes in use are counted. With `fake_gpu_shapes(1)` operations compute shapes only: memory is
// counted but not taken, and what the host reads is 0.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

std::mutex lock;
std::map<std::string, int64_t> counts;
std::set<std::pair<const char*, const char*>> pinned;
int64_t used = 0, peak = 0, limit = 0, kernels = 0, to_device = 0, to_host = 0, syncs = 0;
std::atomic<bool> shapes_only{false};
const c10::Device device(c10::DeviceType::PrivateUse1, 0);

void count(int64_t& total, const std::string& name) {
  std::lock_guard<std::mutex> held(lock);
  ++total;
  ++counts[name];
}

// -- memory -------------------------------------------------------------------------------------------------

struct Held {
  void* data;
  size_t size;
};

void release(void* context) {
  auto* held = static_cast<Held*>(context);
  {
    std::lock_guard<std::mutex> guard(lock);
    used -= static_cast<int64_t>(held->size);
  }
  std::free(held->data);
  delete held;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    {
      std::lock_guard<std::mutex> held(lock);
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          limit == 0 || used + static_cast<int64_t>(size) <= limit,
          "fake GPU out of memory. Tried to allocate ", size, " bytes; ", used, " of ", limit, " are in use");
      used += static_cast<int64_t>(size);
      peak = std::max(peak, used);
    }
    void* data = shapes_only || size == 0 ? nullptr : std::malloc(size);
    return {data, new Held{data, size}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};
DeviceAllocator device_allocator;

void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> held(lock);
    auto found = std::find_if(pinned.begin(), pinned.end(), [&](const auto& one) { return one.first == data; });
    if (found != pinned.end()) {
      pinned.erase(found);
    }
  }
  std::free(data);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  const auto* place = static_cast<const char*>(data);
  return std::any_of(pinned.begin(), pinned.end(), [&](const auto& one) {
    return one.first <= place && place < one.second;
  });
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::malloc(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> held(lock);
    pinned.emplace(static_cast<char*>(data), static_cast<char*>(data) + size);
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count(syncs, "synchronize"); }
  void synchronizeEvent(void*) const override { count(syncs, "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { count(syncs, "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- tensors of the device, seen by CPU kernels ---------------------------------------------------------------

struct Lent {
  std::unordered_map<c10::StorageImpl*, c10::Storage> lent;   // of the device → as the CPU kernel sees it
  std::unordered_map<c10::StorageImpl*, at::Tensor> owned;    // the other way

  at::Tensor lend(const at::Tensor& tensor) {
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    auto found = lent.find(key);
    if (found == lent.end()) {
      c10::Device seen(shapes_only ? c10::DeviceType::Meta : c10::DeviceType::CPU);
      c10::Storage storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
          c10::DataPtr(tensor.storage().mutable_data(), seen),
          c10::GetAllocator(seen.type()), true);
      owned.emplace(storage.unsafeGetStorageImpl(), tensor);
      found = lent.emplace(key, storage).first;
    }
    return make(found->second, shapes_only ? DispatchKey::Meta : DispatchKey::CPU, tensor);
  }

  static at::Tensor make(c10::Storage storage, DispatchKey key, const at::Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return made;
  }

  // Give a tensor the shape and the memory that a kernel with an argument `out` chose for it.
  static void follow(const at::Tensor& given, const at::Tensor& seen) {
    size_t size = seen.storage().nbytes();
    if (size != given.storage().nbytes()) {
      auto data = device_allocator.allocate(size);
      if (data.get() != nullptr) {
        std::memcpy(data.get(), seen.storage().data(), size);
      }
      given.storage().set_data_ptr(std::move(data));
      given.storage().set_nbytes(size);
    }
    given.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
  }

  // What a CPU kernel returned, as a tensor of the device; `is_new` says that it is no view of an argument.
  at::Tensor take(const at::Tensor& tensor, bool& is_new) {
    auto found = owned.find(tensor.storage().unsafeGetStorageImpl());
    if (found != owned.end()) {
      // A view of a tensor that autograd follows is such a tensor, in inference mode too.
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(found->second.storage()), found->second.key_set(), tensor.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      return view;
    }
    is_new = true;
    size_t size = tensor.storage().nbytes();
    auto data = device_allocator.allocate(size);
    if (data.get() != nullptr) {
      std::memcpy(data.get(), tensor.storage().data(), size);
    }
    c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data), &device_allocator, true);
    return make(std::move(storage), DispatchKey::PrivateUse1, tensor);
  }
};

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

const std::set<std::string> synchronising = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::masked_select",
    "aten::equal", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor"};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::string name = c10::toString(op.operator_name());
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  std::vector<c10::IValue> given(arguments.begin(), arguments.end());
  torch::jit::drop(*stack, schema.arguments().size());

  Lent lent;
  bool has_mask = false;
  auto lend = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!is_ours(tensor)) {
      TORCH_CHECK(
          tensor.dim() == 0, "Expected all tensors to be on the same device, but ", name, " got one on ",
          tensor.device(), " and others on ", device);
      return shapes_only ? tensor.to(at::kMeta) : tensor;
    }
    has_mask |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    return lent.lend(tensor);
  };
  std::vector<c10::IValue> seen;
  for (const auto& value : given) {
    if (value.isTensor()) {
      seen.emplace_back(lend(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(lend(tensor));
      }
      seen.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      bool before = has_mask;
      has_mask = false;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(lend(*tensor)) : std::nullopt);
      }
      if (has_mask && name.find("index") != std::string::npos) {
        count(syncs, name + " with a mask");  // CUDA looks for its nonzero places first
      }
      has_mask = before;
      seen.emplace_back(list);
    } else if (value.isDevice()) {
      seen.emplace_back(c10::Device(shapes_only ? c10::DeviceType::Meta : c10::DeviceType::CPU));
    } else {
      seen.push_back(value);
    }
  }

  if (synchronising.count(name)) {
    count(syncs, name);
    if (shapes_only && name == "aten::_local_scalar_dense") {
      stack->emplace_back(c10::Scalar(0));
      return;
    }
  }
  std::vector<c10::IValue> running(seen);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(DispatchKeySet(shapes_only ? DispatchKey::Meta : DispatchKey::CPU), &running);
  }

  bool is_new = false, is_written = false;
  auto take = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined()) {
      return tensor;
    }
    for (size_t place = 0; place < seen.size(); ++place) {
      if (seen[place].isTensor() && seen[place].toTensor().is_same(tensor)) {
        return given[place].toTensor();
      }
    }
    return lent.take(tensor, is_new);
  };
  for (auto& value : running) {
    if (value.isTensor()) {
      stack->emplace_back(take(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(take(tensor));
      }
      stack->emplace_back(list);
    } else {
      stack->push_back(value);
    }
  }
  is_written = schema.is_mutable();
  for (size_t place = 0; is_written && place < given.size(); ++place) {
    if (given[place].isTensor() && is_ours(given[place].toTensor())) {
      Lent::follow(given[place].toTensor(), seen[place].toTensor());
    }
  }
  if (is_new || is_written) {
    count(kernels, name);
  }
}

// -- kernels of its own -----------------------------------------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool from_host = !is_ours(source), onto_host = !is_ours(self);
  if (from_host || onto_host) {
    count(from_host ? to_device : to_host, from_host ? "copy to the device" : "copy to the host");
    if (!(non_blocking && is_pinned(from_host ? source.storage().data() : self.storage().data()))) {
      count(syncs, from_host ? "wait for a copy to the device" : "wait for a copy to the host");
    }
  } else {
    count(kernels, "aten::copy_");
  }
  if (shapes_only) {
    return onto_host ? self.zero_() : self;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Lent lent;
  at::Tensor target = onto_host ? self : lent.lend(self);
  target.copy_(from_host ? source : lent.lend(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::Tensor self = target;
  return copy_(self, source, non_blocking);
}

// The fused attention of CUDA, with what CUDA asks for.
void check_flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    TORCH_CHECK(is_ours(*tensor) && tensor->dim() == 4, "flash attention takes 4-dimensional tensors of the device");
    TORCH_CHECK(
        tensor->scalar_type() == at::kBFloat16 || tensor->scalar_type() == at::kHalf,
        "flash attention takes only fp16 and bf16");
    TORCH_CHECK(tensor->stride(3) == 1, "flash attention needs a contiguous last dimension");
    TORCH_CHECK(
        tensor->size(3) == query.size(3) && query.size(3) % 8 == 0 && query.size(3) <= 256,
        "flash attention takes heads of equal widths, multiples of 8 up to 256");
  }
  TORCH_CHECK(query.size(1) % key.size(1) == 0, "flash attention needs whole groups of heads");
}

using Flash = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Flash flash(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout, bool causal, bool,
    std::optional<double> scale) {
  check_flash(query, key, value);
  count(kernels, "aten::_scaled_dot_product_flash_attention");
  auto options = query.options();
  at::Tensor output, sums;
  if (shapes_only) {
    auto shape = query.sizes();
    output = at::empty({shape[0], shape[2], shape[1], shape[3]}, options).transpose(1, 2);
    sums = at::empty({shape[0], shape[1], shape[2]}, options.dtype(at::kFloat));
  } else {
    at::AutoDispatchBelowADInplaceOrView below;
    Lent lent;
    bool is_new = false;
    auto [found, found_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        lent.lend(query), lent.lend(key), lent.lend(value), dropout, causal, {}, scale);
    output = lent.take(found, is_new), sums = lent.take(found_sums, is_new);
  }
  auto seed = at::empty({2}, options.dtype(at::kUInt64));
  return {output, sums, at::Tensor(), at::Tensor(), query.size(2), key.size(2), seed,
          at::empty({}, options.dtype(at::kUInt64)), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& output, const at::Tensor& sums, const at::Tensor&, const at::Tensor&, c10::SymInt most_queries,
    c10::SymInt most_keys, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  check_flash(query, key, value);
  TORCH_CHECK(sums.scalar_type() == at::kFloat && sums.sizes() == query.sizes().slice(0, 3), "log-sums [B, H, Q]");
  TORCH_CHECK(sums.is_contiguous(), "the kernel reads log-sums without strides");
  TORCH_CHECK(most_queries == query.size(2) && most_keys == key.size(2), "lengths of the batch");
  count(kernels, "aten::_scaled_dot_product_flash_attention_backward");
  if (shapes_only) {
    return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Lent lent;
  bool is_new = false;
  auto [one, two, three] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      lent.lend(grad), lent.lend(query), lent.lend(key), lent.lend(value), lent.lend(output), lent.lend(sums), dropout,
      causal, {}, scale);
  return {lent.take(one, is_new), lent.take(two, is_new), lent.take(three, is_new)};
}

// A product of half-precision matrices that is kept in float32: an overload that only CUDA has.
at::Tensor bmm_to(const at::Tensor& self, const at::Tensor& other, at::ScalarType dtype) {
  TORCH_CHECK(is_ours(self) && is_ours(other), "Expected all tensors to be on the same device");
  TORCH_CHECK(
      dtype == at::kFloat && self.scalar_type() == other.scalar_type() &&
          (self.scalar_type() == at::kBFloat16 || self.scalar_type() == at::kHalf),
      "out_dtype is float32, of fp16 or bf16 inputs");
  count(kernels, "aten::bmm.dtype");
  if (shapes_only) {
    return at::empty({self.size(0), self.size(1), other.size(2)}, self.options().dtype(dtype));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  Lent lent;
  bool is_new = false;
  return lent.take(at::bmm(lent.lend(self).to(dtype), lent.lend(other).to(dtype)), is_new);
}

at::Tensor convolve(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef more,
    c10::SymInt groups) {
  count(kernels, "aten::convolution");
  at::AutoDispatchBelowADInplaceOrView below;
  Lent lent;
  bool is_new = false;
  auto added = bias && bias->defined() ? std::optional<at::Tensor>(lent.lend(*bias)) : std::nullopt;
  return lent.take(
      at::convolution_symint(
          lent.lend(input), lent.lend(weight), added, stride, padding, dilation, transposed, more, groups),
      is_new);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  m.impl("bmm.dtype", &bmm_to);
  m.impl("convolution_overrideable", &convolve);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
}

Hooks hooks;

}  // namespace

extern "C" {

void fake_gpu_begin() {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator);
}

void fake_gpu_shapes(int on) {
  shapes_only = on != 0;
}

void fake_gpu_limit(int64_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  limit = bytes == 0 ? 0 : used + bytes;
}

// kernels, copies to the device, copies to the host, synchronisations, bytes in use, most bytes in use
void fake_gpu_read(int64_t* found) {
  std::lock_guard<std::mutex> held(lock);
  const int64_t values[] = {kernels, to_device, to_host, syncs, used, peak};
  std::copy(std::begin(values), std::end(values), found);
}

void fake_gpu_clear() {
  std::lock_guard<std::mutex> held(lock);
  kernels = to_device = to_host = syncs = 0;
  peak = used;
  counts.clear();
}

// Lines "name count"; returns how long they are.
int64_t fake_gpu_names(char* target, int64_t room) {
  std::lock_guard<std::mutex> held(lock);
  std::string text;
  for (const auto& [name, number] : counts) {
    text += name + "\t" + std::to_string(number) + "\n";
  }
  auto length = std::min<int64_t>(room, static_cast<int64_t>(text.size()));
  std::copy(text.begin(), text.begin() + length, target);
  return static_cast<int64_t>(text.size());
}
}
