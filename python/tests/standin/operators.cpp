// Operators of the stand-in device: copies, and the CPU's kernels on the threads of streams for everything else.
#include "standin.h"

#include <cstring>
#include <optional>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace standin {
namespace {

using at::IValue;
using at::Tensor;
using Stack = torch::jit::Stack;

const c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

// A CPU tensor in the memory of a device tensor, for the threads of streams. It does not keep that memory.
Tensor alias(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  return at::from_blob(inside(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), kKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, allocator(), kKey, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto& storage = impl->unsafe_storage();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > storage.nbytes()) {
    auto data = allocator()->allocate(bytes);
    if (storage.nbytes() > 0) allocator()->copy_data(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(
    Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

// Both are contiguous, of one type. Unpinned memory is staged, as by CUDA: the call returns once it is read.
void upload(const Tensor& to, const Tensor& from, bool non_blocking) {
  const size_t bytes = from.nbytes();
  void* into = inside(to.data_ptr());
  const void* source = from.data_ptr();
  if (is_pinned(source, bytes)) {
    submit(Kind::copy, [into, source, bytes] {
      TORCH_CHECK(is_pinned(source, bytes), "a copy reads host memory that is pinned no longer");
      std::memcpy(into, source, bytes);
    });
  } else {
    const auto* begin = static_cast<const char*>(source);
    submit(Kind::copy, [into, staged = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(into, staged.data(), staged.size());
    });
  }
  if (!non_blocking) synchronize();
}

void download(const Tensor& to, const Tensor& from, bool non_blocking) {
  const size_t bytes = from.nbytes();
  void* into = to.data_ptr();
  const bool pinned = is_pinned(into, bytes);
  submit(Kind::copy, [into, source = inside(from.data_ptr()), bytes, pinned] {
    TORCH_CHECK(!pinned || is_pinned(into, bytes), "a copy writes to host memory that is pinned no longer");
    std::memcpy(into, source, bytes);
  });
  if (!non_blocking || !pinned) synchronize();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (self.device() == source.device()) {
    submit(Kind::copy, [to = alias(self), from = alias(source)]() mutable {
      at::AutoDispatchBelowADInplaceOrView guard;
      to.copy_(from);
    });
  } else if (self.is_privateuseone()) {
    Tensor from = source.to(self.scalar_type()).expand_as(self).contiguous();
    Tensor to = self.is_contiguous() ? self : at::empty_like(self, {}, at::MemoryFormat::Contiguous);
    upload(to, from, non_blocking);
    if (!to.is_same(self)) self.copy_(to);
  } else {
    Tensor from = source.expand_as(self).contiguous();
    const bool direct = self.is_contiguous() && self.scalar_type() == from.scalar_type();
    Tensor to = direct ? self : at::empty(self.sizes(), self.options().dtype(from.dtype()));
    download(to, from, non_blocking && direct);
    if (!direct) self.copy_(to);
  }
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Tensor value = at::empty({}, at::TensorOptions().dtype(self.dtype()));
  download(value, self, false);
  return at::_local_scalar_dense(value);
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(kDevice).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

Tensor uploaded(const Tensor& tensor) {
  return tensor.to(tensor.options().device(at::Device(kDevice, 0)));
}

// Scalars of the host are taken as they are now: the host may change them before the kernel runs.
Tensor scalar(const Tensor& tensor, const c10::OperatorHandle& op) {
  TORCH_CHECK(
      tensor.dim() == 0, "standin: ", op.operator_name(), " got a tensor on ", tensor.device(),
      ": expected all tensors on the device");
  Tensor taken = tensor.clone();
  taken.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return taken;
}

// The argument with every device tensor replaced, and the device too.
template <typename Replace>
IValue replaced(const IValue& value, at::DeviceType device, const c10::OperatorHandle& op, Replace replace) {
  auto of = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return tensor.is_privateuseone() ? replace(tensor) : scalar(tensor, op);
  };
  if (value.isTensor()) return of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(of(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(of(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return at::Device(device);
  return value;
}

// Indices may be on the host: they are brought first, as by CUDA.
void bring_indices(Stack& arguments) {
  for (IValue& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() && tensor->is_cpu() ? uploaded(*tensor) : tensor);
    value = list;
  }
}

Tensor meta(const Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// What the operator returns, without data. Nothing if that depends on data.
std::optional<Stack> shapes(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack stack;
  for (const IValue& value : arguments) stack.push_back(replaced(value, at::kMeta, op, meta));
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;  // the kernel itself says what is wrong with the arguments, if anything is
  }
  // The CPU's kernel has statistics of the input's type.
  if (op.operator_name().name == "aten::native_layer_norm")
    for (size_t i : {1, 2}) stack[i] = stack[i].toTensor().to(arguments[0].toTensor().scalar_type());
  return stack;
}

IValue made_like(const IValue& value) {
  auto of = [](const Tensor& t) {
    return t.defined() ? empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {}) : t;
  };
  if (value.isTensor()) return of(value.toTensor());
  c10::List<Tensor> list;
  for (const Tensor& tensor : value.toTensorVector()) list.push_back(of(tensor));
  return list;
}

std::vector<Tensor> tensors(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<Tensor>();
}

// The argument that each return value is, of operators in place and with out=. Nothing if it is new.
using Written = std::vector<std::optional<size_t>>;

std::optional<size_t> written_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return std::nullopt;
  TORCH_CHECK(result.alias_info()->isWrite(), "standin: no kernel for the view ", schema.operator_name());
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info != nullptr && info->beforeSets() == result.alias_info()->beforeSets()) return i;
  }
  TORCH_CHECK(false, "standin: ", schema.operator_name(), " returns an argument that it does not name");
}

struct Result {
  IValue value;               // on the device
  std::vector<Tensor> alias;  // where the kernel's new tensors are copied to
};

void run(const c10::OperatorHandle& op, Stack& stack, std::vector<Result> results) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < results.size(); i++) {
    const auto found = results[i].alias.empty() ? std::vector<Tensor>() : tensors(stack[i]);
    for (size_t k = 0; k < found.size(); k++) {
      if (!results[i].alias[k].defined()) continue;
      Tensor& to = results[i].alias[k];
      TORCH_CHECK(
          found[k].sizes() == to.sizes() && found[k].scalar_type() == to.scalar_type(), op.operator_name(),
          " made another tensor than foretold");
      to.copy_(found[k]);
    }
  }
}

// Runs the kernel now: its result decides what the host does next.
void run_now(
    const c10::OperatorHandle& op, Stack& stack, Stack& kernel, const Written& written, const Stack& arguments) {
  std::exception_ptr error;
  submit(Kind::kernel, [&] {
    try {
      run(op, kernel, {});
    } catch (...) {
      error = std::current_exception();
    }
  });
  synchronize();
  if (error) std::rethrow_exception(error);
  for (size_t i = 0; i < written.size(); i++) {
    if (written[i]) {
      stack.push_back(arguments[*written[i]]);
    } else if (kernel[i].isTensor() && kernel[i].toTensor().defined()) {
      stack.push_back(uploaded(kernel[i].toTensor()));
    } else {
      stack.push_back(kernel[i]);
    }
  }
}

// Outputs without elements get the shape of the result, as from other devices.
void resize_outputs(const c10::OperatorHandle& op, const Stack& arguments, const Written& written) {
  bool any = false;
  for (const auto& w : written)
    any |= w && op.schema().arguments()[*w].is_out() && arguments[*w].isTensor() &&
        arguments[*w].toTensor().numel() == 0;
  if (!any) return;
  auto found = shapes(op, arguments);
  for (size_t i = 0; found && i < written.size(); i++)
    if (written[i] && arguments[*written[i]].toTensor().numel() == 0)
      resize_(arguments[*written[i]].toTensor(), (*found)[i].toTensor().sizes(), {});
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Stack arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, arguments.size());
  bring_indices(arguments);
  bool is_foretold = true, makes = false, draws = false;  // random numbers: in the order of the host's program
  for (const auto& argument : schema.arguments()) draws |= argument.name() == "generator";
  Written written;
  for (const auto& result : schema.returns()) {
    written.push_back(written_argument(schema, result));
    const auto kind = result.type()->kind();
    if (written.back()) continue;
    makes = true;
    is_foretold &= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  }
  resize_outputs(op, arguments, written);
  Stack kernel;
  for (const IValue& value : arguments) kernel.push_back(replaced(value, at::kCPU, op, alias));
  std::optional<Stack> foretold;
  if (makes && is_foretold && !draws) foretold = shapes(op, arguments);
  if (draws || (makes && !foretold)) return run_now(op, *stack, kernel, written, arguments);
  std::vector<Result> results;
  for (size_t i = 0; i < written.size(); i++) {
    Result result;
    result.value = written[i] ? arguments[*written[i]] : made_like((*foretold)[i]);
    if (!written[i])
      for (const Tensor& t : tensors(result.value)) result.alias.push_back(t.defined() ? alias(t) : t);
    results.push_back(std::move(result));
  }
  for (const Result& result : results) stack->push_back(result.value);
  for (Result& result : results) result.value = {};  // the queue keeps no memory
  submit(Kind::kernel, [op, kernel = std::move(kernel), results = std::move(results)]() mutable {
    run(op, kernel, std::move(results));
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(at::native::view)));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  // These have a form for all devices, whose bits are not those of the CPU's kernels.
  for (const char* name : {"native_layer_norm", "silu_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace standin
