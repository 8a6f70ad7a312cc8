// Kernels that the CPU cannot stand for: memory, views, copies between devices.
#pragma once
#include "dispatch.h"

namespace {
Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<Device> dev,
                           std::optional<bool> pin, std::optional<at::MemoryFormat> mf) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(dev.value_or(Device(DeviceType::CUDA, t_device)));
  return at::detail::empty_generic_symint(size, &g_allocator, DispatchKeySet(DispatchKey::CUDA),
                                          c10::dtype_or_default(dtype), mf);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> dev, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(dev.value_or(Device(DeviceType::CUDA, t_device)));
  return at::detail::empty_strided_symint_generic(
      size, stride, &g_allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
Tensor strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
               std::optional<int64_t> offset) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride,
                                                 offset.value_or(self.storage_offset()));
  return r;
}
Tensor view(const Tensor& self, at::IntArrayRef size) {
  auto inferred = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return strided(self, inferred, *stride, self.storage_offset());
}
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return strided(self, size, stride, self.storage_offset());
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> mf) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes =
      at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes())
    at::native::resize_bytes_cpu(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}
Tensor& set_storage_offset(Tensor& self, at::Storage src, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(src);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.size()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage src) {
  int64_t n = src.nbytes() / self.itemsize();
  return set_storage_offset(self, src, 0, {n}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& src) {
  return set_storage_offset(self, src.storage(), src.storage_offset(), src.sizes(), src.strides());
}
Tensor& set_(Tensor& self) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, g_allocator.allocate(0), &g_allocator, true);
  return set_storage_offset(self, s, 0, {0}, {});
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  TORCH_CHECK(src.defined(), "source is undefined");
  if (self.is_meta() || src.is_meta()) {
    TORCH_CHECK_NOT_IMPLEMENTED(self.is_meta(), "Cannot copy out of meta tensor; no data!");
    return self;
  }
  bool to = on_cuda(self), from = on_cuda(src);
  std::string what = to && from ? "aten::copy_ (device to device)"
                     : to       ? "aten::copy_ (host to device)"
                                : "aten::copy_ (device to host)";
  if (!t_inside) {
    if (to != from && self.numel()) {
      const Tensor& cpu = to ? src : self;
      bool pinned = cpu.numel() && is_pinned_ptr(cpu.storage().data());
      if (!non_blocking) sync(to ? "host to device" : "device to host", what);
      else if (!pinned) {
        if (!to) sync("device to host", what + " non_blocking, not pinned");
        else call_py(g_on_sync, "host to device, staged", what);
      }
    }
    launched(what);
  }
  Inside in;
  auto x = host(self);
  x.copy_(host(src));
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor d = dst;
  copy_(d, self, non_blocking);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  if (!t_inside) {
    sync("device to host", "aten::_local_scalar_dense");
    launched("aten::_local_scalar_dense");
  }
  Inside in;
  return at::_local_scalar_dense(host(self));
}
bool equal(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(),
              "Cannot compare two tensors on different devices. Got: ", a.device(), " and ",
              b.device());
  if (!t_inside) {
    sync("kernel", "aten::equal");
    launched("aten::equal");
  }
  Inside in;
  return at::equal(host(a), host(b));
}
// bfloat16 products summed and returned in float32; CUDA alone has it.
Tensor bmm_dtype(const Tensor& a, const Tensor& b, at::ScalarType out) {
  TORCH_CHECK(on_cuda(a) && on_cuda(b) && a.device() == b.device(),
              "Expected all tensors to be on the same device (aten::bmm.dtype)");
  TORCH_CHECK(a.dim() == 3 && b.dim() == 3, "batch1 and batch2 must be 3D tensors");
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "expected scalar type ", a.scalar_type(),
              " but found ", b.scalar_type());
  TORCH_CHECK(out == a.scalar_type() || (out == at::kFloat && (a.scalar_type() == at::kHalf ||
                                                               a.scalar_type() == at::kBFloat16)),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  launched("aten::bmm.dtype");
  Inside in;
  return device(at::bmm(host(a).to(out), host(b).to(out)), a.device().index());
}
Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType out) {
  return bmm_dtype(a.unsqueeze(0), b.unsqueeze(0), out).squeeze(0);
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

void record_stream(Tensor&, c10::Stream) {}
bool is_pinned(const Tensor& self, std::optional<Device>) {
  return self.device().is_cpu() && self.has_storage() && is_pinned_ptr(self.storage().data());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("equal", &equal);
  m.impl("bmm.dtype", &bmm_dtype);
  m.impl("mm.dtype", &mm_dtype);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("record_stream", &record_stream);
}
}  // namespace
