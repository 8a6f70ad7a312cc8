// Every kernel that is not in kernels.h: what a GPU refuses is refused, the CPU computes the rest.
#pragma once
#include "device.h"

namespace {
// Kernels that take no 0-dimensional CPU tensor beside CUDA ones.
const std::set<std::string> STRICT = {
    "aten::mm",           "aten::bmm",           "aten::addmm",
    "aten::baddbmm",      "aten::gather",        "aten::scatter",
    "aten::scatter_",     "aten::scatter_add",   "aten::scatter_add_",
    "aten::index_select", "aten::embedding",     "aten::cat",
    "aten::index_add",    "aten::index_add_",    "aten::index_copy_",
    "aten::searchsorted", "aten::masked_select", "aten::masked_scatter_",
    "aten::_softmax",     "aten::_log_softmax",  "aten::scatter_reduce",
    "aten::take",         "aten::index_fill_",
};
// Kernels that CUDA has not, and a CPU has.
bool cpu_only(const std::string& n) {
  return n.find("_for_cpu") != std::string::npos || n.find("mkldnn") != std::string::npos ||
         n.find("quantized") != std::string::npos;
}

void note_syncs(const std::string& name, const c10::FunctionSchema& schema,
                const std::vector<c10::IValue>& args) {
  static const std::set<std::string> waits = {"aten::nonzero",
                                              "aten::masked_select",
                                              "aten::_unique2",
                                              "aten::unique_dim",
                                              "aten::unique_consecutive",
                                              "aten::unique_dim_consecutive",
                                              "aten::_unique",
                                              "aten::equal",
                                              "aten::bincount",
                                              "aten::_local_scalar_dense",
                                              "aten::repeat_interleave",
                                              "aten::is_nonzero",
                                              "aten::_linalg_check_errors",
                                              "aten::linalg_inv_ex",
                                              "aten::histc"};
  if (name == "aten::repeat_interleave" && args.size() > 1 && args[1].isInt())
    return;  // output_size
  if (waits.count(name)) {
    sync("kernel", name);
    return;
  }
  // `index` is structured: what stands before it has called nonzero, and copied, already.
  if (name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" ||
      name == "aten::_unsafe_index_put") {
    bool accumulate = name == "aten::_index_put_impl_" && args[3].toBool();
    if (name == "aten::_index_put_impl_" && !accumulate && args[2].isTensor()) {
      // masked_fill stands in for one number of the host
      const auto& v = args[2].toTensor();
      bool all_masks = true;
      int n = 0;
      for (const auto& i : args[1].toListRef())
        if (i.isTensor() && i.toTensor().defined()) {
          n++;
          auto st = i.toTensor().scalar_type();
          all_masks &= st == at::kBool || st == at::kByte;
        }
      if (v.numel() == 1 && v.device().is_cpu() && all_masks && n == 1) return;
    }
    for (const auto& i : args[1].toListRef()) {
      if (!i.isTensor() || !i.toTensor().defined()) continue;
      const auto& t = i.toTensor();
      if (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte) {
        if (on_cuda(t)) sync("nonzero of a mask", name);
        else sync("copy of an index", name);
      } else if (!on_cuda(t)) sync("copy of an index", name);
    }
  }
}

void run_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}

c10::IValue to_host(const c10::IValue& v) {
  if (v.isTensor()) return host(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> l;
    for (const Tensor& t : v.toTensorList()) l.push_back(host(t));
    return l;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> l;
    for (const auto& e : v.toOptionalTensorList()) {
      std::optional<Tensor> t = e;
      l.push_back(t ? std::optional<Tensor>(host(*t)) : t);
    }
    return l;
  }
  if (v.isList()) {
    auto ref = v.toListRef();
    bool tensors = !ref.empty();
    for (const auto& e : ref) tensors &= e.isTensor();
    if (tensors) {
      c10::List<Tensor> l;
      for (const auto& e : ref) l.push_back(host(e.toTensor()));
      return l;
    }
  }
  if (v.isDevice() && v.toDevice().is_cuda()) return Device(DeviceType::CPU);
  if (v.isGenerator()) {
    auto g = v.toGenerator();
    if (g.defined() && g.device().is_cuda())
      return static_cast<Gen*>(g.unsafeGetGeneratorImpl())->cpu;
  }
  return v;
}

void each_tensor(const c10::IValue& v, const std::function<void(const Tensor&)>& f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isList())
    for (const auto& e : v.toListRef()) each_tensor(e, f);
}

struct Inside {
  Inside() { t_inside++; }
  ~Inside() { t_inside--; }
};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  const size_t n = schema.arguments().size();
  std::vector<c10::IValue> args(stack->end() - n, stack->end());
  TORCH_CHECK(!cpu_only(name), "Could not run '", name,
              "' with arguments from the 'CUDA' backend (pretend device)");
  // -- devices
  std::optional<Device> where;
  bool factory = false;
  for (size_t i = 0; i < n; i++)
    each_tensor(args[i], [&](const Tensor& t) {
      if (!on_cuda(t)) return;
      if (!where) where = t.device();
      TORCH_CHECK(*where == t.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  *where, " and ", t.device(), "! (", name, ")");
    });
  if (!where) {
    factory = true;
    for (auto& a : args)
      if (a.isDevice() && a.toDevice().is_cuda()) where = a.toDevice();
    for (auto& a : args)
      if (a.isGenerator() && a.toGenerator().defined() && a.toGenerator().device().is_cuda() &&
          !where)
        where = a.toGenerator().device();
    TORCH_CHECK(where, "pretend: ", name, " without a CUDA argument");
  }
  DeviceIndex index = where->index() < 0 ? t_device : where->index();
  const bool indexing = name == "aten::index" || name == "aten::_index_put_impl_" ||
                        name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
  for (size_t i = 0; i < n; i++)
    each_tensor(args[i], [&](const Tensor& t) {
      if (on_cuda(t)) return;
      if (t.is_meta())
        TORCH_CHECK(
            false,
            "Expected all tensors to be on the same device, but found at least two devices, ",
            *where, " and meta! (", name, ")");
      if (indexing && i == 1) {
        TORCH_CHECK(
            on_cuda(args[0].toTensor()),
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
        return;
      }
      if (t.dim() == 0 && !STRICT.count(name)) return;
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, ",
          *where, " and cpu! (argument '", schema.arguments()[i].name(), "' of ", name, ")");
    });
  if (indexing && !on_cuda(args[0].toTensor()))
    TORCH_CHECK(
        false,
        "indices should be either on cpu or on the same device as the indexed tensor (cpu) (", name,
        ")");
  for (size_t i = 0; i < n; i++)
    if (args[i].isGenerator() && args[i].toGenerator().defined())
      TORCH_CHECK(args[i].toGenerator().device().is_cuda(),
                  "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
  if (name == "aten::cumsum" && at::globalContext().deterministicAlgorithms() &&
      args[0].toTensor().is_floating_point())
    at::globalContext().alertNotDeterministic("cumsum_cuda_kernel");
  if ((name == "aten::histc" || name == "aten::put_") &&
      at::globalContext().deterministicAlgorithms())
    at::globalContext().alertNotDeterministic(name);
  bool has_generator = false;
  for (size_t i = 0; i < n; i++)
    if (schema.arguments()[i].name() == "generator") has_generator = true;
  if (has_generator)
    for (size_t i = 0; i < n; i++)
      if (schema.arguments()[i].name() == "generator" && args[i].isNone())
        args[i] = generators()[index];
  if (!t_inside) {
    note_syncs(name, schema, args);
    launched(name);
  }
  // -- arguments on the host
  torch::jit::Stack call;
  call.reserve(n);
  std::vector<std::pair<Tensor, Tensor>> same;  // of the device, of the host
  for (size_t i = 0; i < n; i++) {
    auto v = to_host(args[i]);
    std::vector<Tensor> a, b;
    each_tensor(args[i], [&](const Tensor& t) { a.push_back(t); });
    each_tensor(v, [&](const Tensor& t) { b.push_back(t); });
    for (size_t k = 0; k < a.size() && k < b.size(); k++)
      if (on_cuda(a[k])) same.emplace_back(a[k], b[k]);
    call.push_back(std::move(v));
  }
  {
    Inside in;
    run_boxed(op, call);
  }
  // -- what was resized
  for (auto& [dev, cpu] : same) {
    bool moved = cpu.storage().data() != dev.storage().data() && cpu.numel();
    if (moved || cpu.sizes() != dev.sizes() || cpu.strides() != dev.strides()) {
      auto* impl = dev.unsafeGetTensorImpl();
      size_t bytes = at::detail::computeStorageNbytes(cpu.sizes(), cpu.strides(), cpu.itemsize(),
                                                      cpu.storage_offset());
      if (bytes > dev.storage().nbytes())
        at::native::resize_bytes_cpu(dev.storage().unsafeGetStorageImpl(), bytes);
      impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      if (moved && bytes) memcpy(dev.storage().mutable_data(), cpu.storage().data(), bytes);
    }
  }
  // -- results
  const auto& rets = schema.returns();
  auto back = [&](const Tensor& t, const c10::AliasInfo* alias) -> Tensor {
    if (!t.defined()) return t;
    for (auto& [dev, cpu] : same)
      if (t.unsafeGetTensorImpl() == cpu.unsafeGetTensorImpl()) return dev;
    for (auto& [dev, cpu] : same)
      if (t.has_storage() && t.storage().data() && t.storage().data() == cpu.storage().data() &&
          !(alias && alias->isWrite()))
        return view_of(dev, t);
    return device(t, index);
  };
  std::vector<c10::IValue> results;
  for (size_t r = 0; r < rets.size(); r++) {
    const auto& v = call[call.size() - rets.size() + r];
    const auto* alias = rets[r].alias_info();
    if (v.isTensor()) results.push_back(back(v.toTensor(), alias));
    else if (v.isTensorList()) {
      c10::List<Tensor> l;
      for (const Tensor& t : v.toTensorList()) l.push_back(back(t, alias));
      results.push_back(l);
    } else results.push_back(v);
  }
  stack->erase(stack->end() - n, stack->end());
  for (auto& r : results) stack->push_back(std::move(r));
}
}  // namespace
