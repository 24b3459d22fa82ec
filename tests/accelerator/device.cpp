// A device for tests: its memory and its arithmetic are the CPU's, everything else is as on an accelerator.
//
// Autograd runs its backward passes in a worker thread, tensors of two devices do not mix, and reading a number waits for the
// device: the waits are counted.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>  // quicker to compile than torch/extension.h
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);

std::mutex mutex;
std::map<std::string, int64_t> waits, launches;

void count_wait(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex);
  ++waits[reason];
}

void count_launch(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex);
  ++launches[name];
}

bool is_here(const Tensor& t) { return t.defined() && t.device().type() == DEVICE.type(); }

// The same memory as storage of another device.
c10::Storage storage_on(c10::Device device, const c10::Storage& storage) {
  auto keep_alive = [](void* s) { delete static_cast<c10::Storage*>(s); };
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      at::DataPtr(storage.mutable_data(), new c10::Storage(storage), keep_alive, device), c10::GetAllocator(device.type()), true);
}

// The same memory as a tensor of another device.
Tensor alias_on(c10::Device device, c10::DispatchKey key, const Tensor& t) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(storage_on(device, t.storage()), c10::DispatchKeySet(key), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

Tensor to_cpu(const Tensor& t) { return t.defined() ? alias_on(c10::kCPU, c10::DispatchKey::CPU, t) : t; }
Tensor to_here(const Tensor& t) { return t.defined() ? alias_on(DEVICE, c10::DispatchKey::PrivateUse1, t) : t; }
OptionalTensor to_cpu(const OptionalTensor& t) { return t && t->defined() ? OptionalTensor(to_cpu(*t)) : std::nullopt; }

// What an operation made of the alias of a tensor: another shape, perhaps other memory.
void follow(const Tensor& t, const Tensor& alias) {
  auto* impl = t.unsafeGetTensorImpl();
  if (alias.storage().data() != t.storage().data()) impl->set_storage_keep_dtype(storage_on(DEVICE, alias.storage()));
  if (alias.sizes() != t.sizes() || alias.strides() != t.strides())
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

struct Generator : c10::GeneratorImpl {
  c10::intrusive_ptr<at::CPUGeneratorImpl> inner = c10::make_intrusive<at::CPUGeneratorImpl>();
  Generator() : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner->set_offset(offset); }
  uint64_t get_offset() const override { return inner->get_offset(); }
  uint64_t current_seed() const override { return inner->current_seed(); }
  uint64_t seed() override { return inner->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator();
    copy->set_state(*inner->get_state());
    return copy;
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>();
  return generator;
}

bool takes_indices(const std::string& name) {
  static const std::set<std::string> names = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(name);
}

// Operations whose result has a shape, or is a number, that only the device knows; copies are counted in `copy_from`.
void count_waits(const std::string& name, const torch::jit::Stack& stack, size_t begin) {
  static const std::set<std::string> reads = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive"};
  if (reads.count(name)) count_wait(name);
  if (!takes_indices(name)) return;
  for (const at::IValue& index : stack[begin + 1].toListRef())
    if (index.isTensor() && index.toTensor().defined())
      if (!is_here(index.toTensor()) || index.toTensor().scalar_type() == at::kBool) count_wait(name);
}

template <class F>
void replace_tensors(at::IValue& value, const F& replaced) {
  if (value.isTensor()) {
    value = replaced(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(replaced(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<OptionalTensor> list;
    for (const OptionalTensor& t : value.toOptionalTensorVector()) list.push_back(t ? OptionalTensor(replaced(*t)) : t);
    value = list;
  }
}

// While it lives, the CPU draws the random numbers of this device.
struct DrawsHere {
  at::Generator of_cpu = at::detail::getDefaultCPUGenerator(), of_device = default_generator();
  Tensor state = of_cpu.get_state();
  DrawsHere() { of_cpu.set_state(of_device.get_state()); }
  ~DrawsHere() {
    of_device.set_state(of_cpu.get_state());
    of_cpu.set_state(state);
  }
};

// Any operation: done by the CPU on aliases of its arguments.
void on_aliases(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const size_t begin = stack->size() - op.schema().arguments().size();
  count_waits(name, *stack, begin);
  count_launch(name);

  std::vector<std::pair<Tensor, Tensor>> aliases;
  auto there = [&](const Tensor& t) {
    if (!t.defined()) return t;
    if (!is_here(t)) {
      TORCH_CHECK(t.dim() == 0 || takes_indices(name), name, ": a tensor is on ", t.device(), ", another one on ", DEVICE);
      return t;
    }
    for (const auto& [original, alias] : aliases)
      if (original.is_same(t)) return alias;
    return aliases.emplace_back(t, to_cpu(t)).second;
  };
  for (size_t i = begin; i < stack->size(); ++i) {
    at::IValue& value = (*stack)[i];
    replace_tensors(value, there);
    if (value.isDevice() && value.toDevice().type() == DEVICE.type()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == DEVICE.type()) {
      value = at::Generator(static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner);
    }
  }

  {
    std::optional<DrawsHere> draws;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) draws.emplace();
    op.callBoxed(stack);
  }

  for (const auto& [original, alias] : aliases) follow(original, alias);
  auto back = [&](const Tensor& t) {
    for (const auto& [original, alias] : aliases)
      if (t.defined() && alias.is_same(t)) return original;
    return to_here(t);
  };
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) replace_tensors((*stack)[i], back);
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pin = std::optional<bool>;

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, Device, Pin) {
  return to_here(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype)));
}

Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, Device, Pin, std::optional<at::MemoryFormat> format) {
  return to_here(at::empty(size, at::TensorOptions().dtype(dtype), format));
}

Tensor zeros(c10::SymIntArrayRef size, Dtype dtype, Layout, Device, Pin) {
  return to_here(at::zeros_symint(size, at::TensorOptions().dtype(dtype)));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto alias = to_cpu(self);
  follow(self, alias.resize_(size, format));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  count_launch("copy");
  if (is_here(self) != is_here(dst)) count_wait(is_here(self) ? "copy to the CPU" : "copy from the CPU");
  (is_here(dst) ? to_cpu(dst) : dst).copy_(is_here(self) ? to_cpu(self) : self);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const Tensor& self) {
  count_wait("item");
  return to_cpu(self).item();
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(is_here(input) && is_here(weight), "convolution: tensors on two devices");
  return to_here(at::convolution(
      to_cpu(input), to_cpu(weight), to_cpu(bias), stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  TORCH_CHECK(is_here(grad) && is_here(input) && is_here(weight), "convolution_backward: tensors on two devices");
  const int64_t channels[] = {transposed ? weight.size(1) * groups : weight.size(0)};
  auto [x, w, b] = at::convolution_backward(
      to_cpu(grad), to_cpu(input), to_cpu(weight), channels, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {to_here(x), to_here(w), to_here(b)};
}

// Cells of recurrent networks are single operations on accelerators, which CPUs do not have.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& c, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto sum = of_input + of_hidden;
  if (input_bias && input_bias->defined()) sum = sum + *input_bias + *hidden_bias;
  auto parts = sum.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto next = f * c + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_h, const OptionalTensor& grad_c, const Tensor& c, const Tensor& next, const Tensor& gates,
    bool has_bias) {
  auto parts = gates.chunk(4, 1);
  auto i = parts[0], f = parts[1], g = parts[2], o = parts[3], t = next.tanh();
  auto h = grad_h && grad_h->defined() ? *grad_h : at::zeros_like(c);
  auto total = h * o * (1 - t * t);
  if (grad_c && grad_c->defined()) total = total + *grad_c;
  auto sums = at::cat(
      {total * g * i * (1 - i), total * c * f * (1 - f), total * i * (1 - g * g), h * t * o * (1 - o)}, 1);
  return {sums, total * f, has_bias ? sums.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& h, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const bool has_bias = input_bias && input_bias->defined();
  auto x = (has_bias ? of_input + *input_bias : of_input).chunk(3, 1);
  auto y = (has_bias ? of_hidden + *hidden_bias : of_hidden).chunk(3, 1);
  auto r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid(), n = (x[2] + r * y[2]).tanh();
  return {n + z * (h - n), at::cat({r, z, n, h, y[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  auto r = parts[0], z = parts[1], n = parts[2], h = parts[3], y = parts[4];
  auto new_gate = grad * (1 - z) * (1 - n * n);
  auto reset = new_gate * y * r * (1 - r), update = grad * (h - n) * z * (1 - z);
  auto of_input = at::cat({reset, update, new_gate}, 1), of_hidden = at::cat({reset, update, new_gate * r}, 1);
  return {of_input, of_hidden, grad * z, has_bias ? of_input.sum(0) : Tensor(), has_bias ? of_hidden.sum(0) : Tensor()};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
};

struct Allocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto* data = new at::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(bytes));
    return {data->get(), data, [](void* d) { delete static_cast<at::DataPtr*>(d); }, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_aliases>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zeros);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  for (const auto* name :
       {"_foreach_add.List", "_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_addcdiv_.ScalarList",
        "_foreach_addcdiv_.Tensor", "_foreach_addcmul_.Scalar", "_foreach_copy_", "_foreach_div_.ScalarList",
        "_foreach_lerp_.Scalar", "_foreach_mul_.Scalar", "_foreach_mul_.Tensor", "_foreach_norm.Scalar", "_foreach_sqrt",
        "_foreach_zero_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_aliases>());  // else they are taken apart
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("default_generator", [] { return default_generator(); });
  m.def("take_launches", [] {
    std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(launches, {});
  });
  m.def("take_waits", [] {
    std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(waits, {});
  });
}
