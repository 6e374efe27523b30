// A CUDA device for a CPU build of PyTorch: tensors on "cuda" have memory and a dispatch key of their own, and their
// kernels are the CPU's, on the same memory.
//
// It is as strict as CUDA where a CPU is not: tensors of two devices do not meet, fresh and freed memory is NaN, a copy
// without a wait arrives at the next wait, backward passes run in a thread of the device, and whatever makes the host
// wait is seen by torch.cuda.set_sync_debug_mode. `install` in __init__.py patches torch.cuda around it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_assert_async_ops.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_upsample_bilinear2d_aa_backward_ops.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/histc_ops.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace {

using at::Tensor;

const c10::Device THE_DEVICE(c10::DeviceType::CUDA, 0);
const c10::DispatchKeySet ON_DEVICE(c10::DispatchKey::CUDA), ON_HOST(c10::DispatchKey::CPU);
constexpr long TOTAL_BYTES = 4l << 30;
constexpr size_t MOST_POISONED = 64 << 20;  // of one block: what fills the device is never touched
constexpr int UNWRITTEN = 0xFF;  // every byte of memory that was not written: NaN in each floating type

const pid_t g_process = getpid();

// ---------------------------------------------------------------------- memory

std::atomic<long> g_allocated{0}, g_peak{0};

void count(long bytes) {
  long now = (g_allocated += bytes), peak = g_peak;
  while (now > peak && !g_peak.compare_exchange_weak(peak, now)) {}
}

struct Block {
  void* memory = nullptr;
  const size_t bytes;
  explicit Block(size_t n) : bytes(n) {
    TORCH_CHECK(posix_memalign(&memory, 64, n ? n : 1) == 0, "the host has no memory for the pretend device");
    poison();
  }
  ~Block() {
    poison();
    std::free(memory);
  }
  void poison() const { std::memset(memory, UNWRITTEN, std::min(bytes, MOST_POISONED)); }
};

void free_on_device(void* block) {
  count(-static_cast<long>(static_cast<Block*>(block)->bytes));
  delete static_cast<Block*>(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(getpid() == g_process, "Cannot re-initialize CUDA in forked subprocess.");
    if (g_allocated + static_cast<long>(bytes) > TOTAL_BYTES)
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, c10::str("CUDA out of memory. Tried to allocate ", bytes, " bytes."));
    auto* block = new Block(bytes);
    count(static_cast<long>(bytes));
    return {bytes ? block->memory : nullptr, block, &free_on_device, THE_DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} g_device_memory;

std::mutex g_mutex;  // of what follows, which is never destroyed: tensors may live longer
auto& g_pinned = *new std::map<const char*, size_t>;

void free_pinned(void* block) {
  {
    std::lock_guard lock(g_mutex);
    g_pinned.erase(static_cast<const char*>(static_cast<Block*>(block)->memory));
  }
  delete static_cast<Block*>(block);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block(bytes);
    std::lock_guard lock(g_mutex);
    g_pinned[static_cast<const char*>(block->memory)] = bytes;
    return {block->memory, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} g_pinned_memory;

bool is_pinned(const void* memory) {
  std::lock_guard lock(g_mutex);
  auto next = g_pinned.upper_bound(static_cast<const char*>(memory));
  if (next == g_pinned.begin()) return false;
  auto [begin, bytes] = *--next;
  return static_cast<const char*>(memory) < begin + std::max<size_t>(bytes, 1);
}

// ---------------------------------------------------------------------- waiting

std::atomic<int> g_sync_mode{0};  // 0: nothing, 1: warn, 2: raise
struct Copy {
  Tensor pinned;      // on the host
  std::string bytes;  // what was in the source when the copy was ordered
};
auto& g_to_host = *new std::vector<Copy>;  // ordered without a wait since the last one
auto& g_to_device = *new std::vector<Copy>;

// What a wait of the host is for: copies from the device are there, and pinned memory may be written again.
void synchronize() {
  std::vector<Copy> to_host, to_device;
  {
    std::lock_guard lock(g_mutex);
    to_host.swap(g_to_host);
    to_device.swap(g_to_device);
  }
  for (auto& copy : to_host) std::memcpy(copy.pinned.data_ptr(), copy.bytes.data(), copy.bytes.size());
  for (auto& copy : to_device)
    TORCH_CHECK(
        std::memcmp(copy.pinned.data_ptr(), copy.bytes.data(), copy.bytes.size()) == 0,
        "pinned memory was written while its copy to the device was under way");
}

void host_waits(const std::string& why) {
  synchronize();
  if (g_sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", why);
  TORCH_CHECK(g_sync_mode != 2, "called a synchronizing CUDA operation: ", why);
}

}  // namespace

// ---------------------------------------------------------------------- what PyTorch asks of a device

namespace {

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = c10::DeviceType::CUDA;
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, THE_DEVICE); }
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return THE_DEVICE; }
  c10::Device getDevice() const override { return THE_DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeEvent(void*) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// Draws the numbers of a CPU generator.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator drawn) : c10::GeneratorImpl(THE_DEVICE, ON_DEVICE), drawn(std::move(drawn)) {}
  void set_current_seed(uint64_t seed) override { drawn.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return drawn.current_seed(); }
  uint64_t seed() override { return drawn.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawn.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return drawn.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(drawn.clone()); }
  at::Generator drawn;
};

at::Generator& default_generator() {
  static at::Generator one = at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
  return one;
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, ::DeviceGuard)
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  long versionCUDART() const override { return 13000; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &g_device_memory; }
  Device getDeviceFromPtr(void*) const override { return THE_DEVICE; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override {
    return make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
  void deviceSynchronize(DeviceIndex) const override { synchronize(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// ---------------------------------------------------------------------- kernels

namespace {

void drop_reference(void* storage) { delete static_cast<c10::Storage*>(storage); }

void drop_result(void* storage) {
  count(-static_cast<long>(static_cast<c10::Storage*>(storage)->nbytes()));
  drop_reference(storage);
}

// The storage's own memory, as a storage of the host that keeps it alive.
c10::Storage seen_from_host(const c10::Storage& storage) {
  auto* kept = new c10::Storage(storage);
  c10::DataPtr memory(kept->mutable_data(), kept, &drop_reference, c10::Device(c10::DeviceType::CPU));
  return {c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(memory), c10::GetCPUAllocator(), true};
}

c10::DataPtr result_on_device(const c10::Storage& storage) {
  auto* kept = new c10::Storage(storage);
  count(static_cast<long>(kept->nbytes()));
  return {kept->mutable_data(), kept, &drop_result, THE_DEVICE};
}

Tensor view_of(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return view;
}

// The tensors of one call of a CPU kernel: of each tensor on the device a view for the host, and of results the reverse.
// Tensors that share memory on one side share it on the other.
class Call {
 public:
  Tensor to_host(const Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    c10::Storage storage;
    for (const auto& [device, host] : pairs_) {
      if (device.is_same(x)) return host;
      if (device.storage().is_alias_of(x.storage())) storage = host.storage();
    }
    if (!storage) storage = seen_from_host(x.storage());
    pairs_.push_back({x, view_of(std::move(storage), ON_HOST, x)});
    return pairs_.back().host;
  }

  Tensor to_device(const Tensor& x) {
    if (!x.defined() || !x.is_cpu()) return x;
    c10::Storage storage;
    for (const auto& [device, host] : pairs_) {
      if (host.is_same(x)) return device;
      if (host.storage().is_alias_of(x.storage())) storage = device.storage();
    }
    if (!storage) storage = {c10::Storage::use_byte_size_t(), x.storage().nbytes(), result_on_device(x.storage()), &g_device_memory, true};
    pairs_.push_back({view_of(std::move(storage), ON_DEVICE, x), x});
    return pairs_.back().device;
  }

  // A kernel may have given its output another size, and memory.
  void take_over_sizes() {
    for (auto& [device, host] : pairs_) {
      auto storage = device.storage();
      if (host.storage().data() != storage.data() && host.storage().nbytes() != storage.nbytes()) {
        storage.set_data_ptr_noswap(result_on_device(host.storage()));
        storage.set_nbytes(host.storage().nbytes());
      }
      if (device.sizes() != host.sizes() || device.strides() != host.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  struct Pair {
    Tensor device, host;
  };
  std::vector<Pair> pairs_;
};

// Every tensor of a value of a boxed call, replaced.
template <typename Function>
void replace_tensors(c10::IValue& value, const Function& of) {
  if (value.isTensor()) {
    value = of(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorList()) list.push_back(of(x));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> x : value.toOptionalTensorList()) list.push_back(x ? std::optional(of(*x)) : x);
    value = std::move(list);
  }
}

// Operations for which CUDA makes the host wait: of results that are numbers, or as long as values make them.
const std::set<std::string> WAITING{
    "aten::_unique", "aten::_unique2", "aten::argwhere", "aten::bincount", "aten::equal", "aten::masked_select",
    "aten::multinomial", "aten::nonzero", "aten::unique_consecutive", "aten::unique_dim", "aten::unique_dim_consecutive"};
const std::set<std::string> INDEXED{"aten::index", "aten::_unsafe_index"};
const std::set<std::string> ASSIGNED{"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};

// Raises for tensors of two devices, and notes what the host has to wait for.
void check(const c10::FunctionSchema& schema, std::span<const c10::IValue> arguments) {
  const auto& name = schema.name();
  const bool assigns = ASSIGNED.count(name), indexes = assigns || INDEXED.count(name);
  bool on_device = false, index_of_host = false, has_mask = false;
  std::string on_host;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_index = indexes && schema.arguments()[i].name() == "indices";
    auto value = arguments[i];
    replace_tensors(value, [&](const Tensor& x) {
      if (!x.defined()) return x;
      on_device |= x.is_cuda();
      if (is_index) {
        index_of_host |= x.is_cpu();
        has_mask |= x.scalar_type() == at::kBool || x.scalar_type() == at::kByte;
      } else if (x.is_cpu() && x.dim() > 0) {
        on_host += c10::str(" ", schema.arguments()[i].name(), x.sizes());
      }
      return x;
    });
  }
  if (!on_device) return;
  TORCH_CHECK(
      on_host.empty(), "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
      name, ", on the CPU:", on_host, ")");
  if (index_of_host) host_waits("copy of an index of " + name);
  if (has_mask) {  // a number is filled in under the mask as it stands
    const bool fills = assigns && arguments[2].toTensor().is_cpu();
    if (!fills) host_waits("mask as an index of " + name);
  }
  const bool needs_sum = name == "aten::repeat_interleave" && arguments.back().isNone();  // no output_size
  if (WAITING.count(name) || needs_sum) host_waits(name);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = std::span(*stack).last(schema.arguments().size());
  check(schema, arguments);
  Call call;
  for (auto& value : arguments) {
    replace_tensors(value, [&](const Tensor& x) { return call.to_host(x); });
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::DeviceType::CPU);
    if (value.isGenerator())
      if (auto* ours = dynamic_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())) value = ours->drawn;
  }
  for (size_t i = 0; i < arguments.size(); ++i)
    if (schema.arguments()[i].name() == "generator" && arguments[i].isNone())
      arguments[i] = static_cast<DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())->drawn;
  op.redispatchBoxed(ON_HOST, stack);
  call.take_over_sizes();
  for (auto& value : std::span(*stack).last(schema.returns().size()))
    replace_tensors(value, [&](const Tensor& x) { return call.to_device(x); });
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &g_device_memory, ON_DEVICE, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(size, stride, &g_device_memory, ON_DEVICE, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& x, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(x, size, stride, offset);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  const bool up = to.is_cuda(), crosses = up != from.is_cuda() && to.numel();
  if (crosses && !non_blocking) host_waits(c10::str("copy of ", from.sizes(), up ? " to the device" : " from the device"));
  Call call;
  Tensor target = call.to_host(to);
  target.copy_(call.to_host(from));
  const Tensor& outside = up ? from : to;
  if (crosses && non_blocking && outside.is_contiguous() && is_pinned(outside.data_ptr())) {
    Copy copy{outside, std::string(static_cast<const char*>(outside.data_ptr()), outside.nbytes())};
    if (!up) std::memset(to.data_ptr(), UNWRITTEN, to.nbytes());
    std::lock_guard lock(g_mutex);
    (up ? g_to_device : g_to_host).push_back(std::move(copy));
  }
  return to;
}

at::Scalar local_scalar_dense(const Tensor& x) {
  host_waits("aten::_local_scalar_dense");
  return at::_ops::_local_scalar_dense::call(Call().to_host(x));
}

const Tensor& resize_(const Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  auto storage = impl->storage();
  const size_t bytes = (c10::multiply_integers(size) + impl->storage_offset()) * impl->itemsize();
  if (bytes > storage.nbytes()) {
    auto memory = g_device_memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return x;
}

Tensor& set_storage(Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return x;
}

Tensor& set_to_tensor(Tensor& x, const Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_to_storage(Tensor& x, at::Storage source) {
  const int64_t entries = source.nbytes() / x.itemsize();
  return set_storage(x, std::move(source), 0, {entries}, {});
}

Tensor& set_to_nothing(Tensor& x) {
  return set_storage(x, {c10::Storage::use_byte_size_t(), 0, g_device_memory.allocate(0), &g_device_memory, true}, 0, {0}, {});
}

void record_stream(Tensor&, c10::Stream) {}

// The limit is that of aten/src/ATen/native/cuda/TensorCompare.cu; it holds whether or not the condition does.
void assert_async(const Tensor& condition, c10::string_view message) {
  TORCH_CHECK(message.length() < 255, "Message length must be smaller than 255");
  at::_ops::_assert_async_msg::call(Call().to_host(condition), message);
}

// CUDA takes integers.
Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  Call call;
  auto counts = at::_ops::histc::call(call.to_host(x).to(at::kFloat), bins, least, most);
  return call.to_device(counts.to(x.scalar_type()));
}

// CUDA takes the first of equal values.
std::tuple<Tensor, Tensor> topk(const Tensor& x, int64_t k, int64_t dim, bool largest, bool) {
  Call call;
  auto [values, places] = at::_ops::sort_stable::call(call.to_host(x), true, dim, largest);
  auto first = [&](const Tensor& sorted) { return call.to_device(sorted.narrow(dim, 0, k).contiguous()); };
  return {first(values), first(places)};
}

// CUDA takes bfloat16.
Tensor upsample_backward(
    const Tensor& grad, at::IntArrayRef output_size, at::IntArrayRef input_size, bool align_corners,
    std::optional<double> scales_h, std::optional<double> scales_w) {
  Call call;
  auto found = at::_ops::_upsample_bilinear2d_aa_backward::call(
      call.to_host(grad).to(at::kFloat), c10::fromIntArrayRefSlow(output_size), c10::fromIntArrayRefSlow(input_size),
      align_corners, scales_h, scales_w);
  return call.to_device(found.to(grad.scalar_type()));
}

// The tensor's own memory, for kernels written in Python.
Tensor host_view(const Tensor& x) { return Call().to_host(x); }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_assert_async.msg", &assert_async);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_upsample_bilinear2d_aa_backward", &upsample_backward);
  m.impl("as_strided", &as_strided);
  m.impl("copy_", &copy_);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("histc", &histc);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_to_nothing);
  m.impl("set_.source_Storage", &set_to_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("topk", &topk);
  m.impl("view", TORCH_FN(at::native::view));
  // These ask which device it is before they come to a kernel.
  for (const char* name : {"_grouped_mm", "_trilinear", "convolution", "convolution_backward", "isin.Tensor_Tensor", "native_batch_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(pretend_cuda, m) {
  m.def("host_view(Tensor x) -> Tensor");
  m.def("synchronize() -> ()", &synchronize);
  m.def("get_rng_state() -> Tensor", [] { return Tensor(default_generator().get_state()); });
  m.def("set_rng_state(Tensor state) -> ()", [](const Tensor& state) { default_generator().set_state(state); });
  m.def("seed(int seed) -> ()", [](int64_t seed) { default_generator().set_current_seed(seed); });
  m.def("sync_mode() -> int", [] { return static_cast<int64_t>(g_sync_mode); });
  m.def("set_sync_mode(int mode) -> ()", [](int64_t mode) { g_sync_mode = static_cast<int>(mode); });
  m.def("allocated() -> int", [] { return static_cast<int64_t>(g_allocated); });
  m.def("peak() -> int", [] { return static_cast<int64_t>(g_peak); });
  m.def("reset_peak() -> ()", [] { g_peak = g_allocated.load(); });
  m.def("total() -> int", [] { return static_cast<int64_t>(TOTAL_BYTES); });
}

TORCH_LIBRARY_IMPL(pretend_cuda, CUDA, m) { m.impl("host_view", &host_view); }

namespace {
const struct Registered {
  Registered() { c10::SetAllocator(c10::DeviceType::CUDA, &g_device_memory); }
} g_registered;
}  // namespace
