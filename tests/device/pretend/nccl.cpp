// "NCCL" over gloo for tensors of the pretend device: what is not on the device is refused, as NCCL
// refuses it.
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
using at::Tensor;
using namespace c10d;
namespace {
struct PretendTimer : c10d::Timer {
  explicit PretendTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimeRef(start), b = getTimeRef(end);
    if (a == kUnsetTime || b == kUnsetTime || b < a) return std::nullopt;
    return b - a;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendTimer);
}  // namespace
namespace {
Tensor host(const Tensor& t) {
  TORCH_CHECK(t.device().is_cuda(), "No backend type associated with device type ",
              t.device().type(), " (pretend NCCL)");
  TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous (pretend NCCL)");
  auto storage = t.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr dp(
      const_cast<void*>(storage.data()), keep,
      [](void* p) { delete static_cast<c10::Storage*>(p); }, c10::Device(c10::DeviceType::CPU));
  c10::Storage s(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(dp), nullptr, false);
  auto r = at::detail::make_tensor<c10::TensorImpl>(
      std::move(s), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return r;
}
std::vector<Tensor> host(const std::vector<Tensor>& v) {
  std::vector<Tensor> r;
  for (auto& t : v) r.push_back(host(t));
  return r;
}
std::vector<std::vector<Tensor>> host(const std::vector<std::vector<Tensor>>& v) {
  std::vector<std::vector<Tensor>> r;
  for (auto& t : v) r.push_back(host(t));
  return r;
}
struct Done : Work {
  Done(OpType t, std::vector<Tensor> o = {}) : Work(-1, t), out(std::move(o)) {
    fut = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                   std::vector<c10::Device>{});
    c10::List<Tensor> l;
    for (auto& x : out) l.push_back(x);
    fut->markCompleted(c10::IValue(l));
  }
  std::vector<Tensor> out;
  c10::intrusive_ptr<c10::ivalue::Future> fut;
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  void synchronize() override {}
  std::vector<Tensor> result() override { return out; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return fut; }
};
struct Pretend : Backend {
  c10::intrusive_ptr<Backend> in;
  std::map<std::string, int64_t> count;
  Pretend(int rank, int size, c10::intrusive_ptr<Backend> b)
      : Backend(rank, size), in(std::move(b)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  c10::intrusive_ptr<Work> done(const char* n, OpType t, std::vector<Tensor> o = {}) {
    count[n]++;
    return c10::make_intrusive<Done>(t, std::move(o));
  }
  static bool avg(ReduceOp& op) {
    if (op.op_ == ReduceOp::AVG) {
      op = ReduceOp(ReduceOp::SUM);
      return true;
    }
    return false;
  }
  c10::intrusive_ptr<Work> broadcast(std::vector<Tensor>& t, const BroadcastOptions& o) override {
    auto h = host(t);
    in->broadcast(h, o)->wait();
    return done("broadcast", OpType::BROADCAST, t);
  }
  c10::intrusive_ptr<Work> allreduce(std::vector<Tensor>& t, const AllreduceOptions& o) override {
    auto h = host(t);
    auto p = o;
    bool a = avg(p.reduceOp);
    in->allreduce(h, p)->wait();
    if (a)
      for (auto& x : h) x.div_(getSize());
    return done("allreduce", OpType::ALLREDUCE, t);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(std::vector<Tensor>& t,
                                               const AllreduceCoalescedOptions& o) override {
    for (auto& x : t) {
      std::vector<Tensor> one{x};
      AllreduceOptions p;
      p.reduceOp = o.reduceOp;
      allreduce(one, p);
    }
    return done("allreduce_coalesced", OpType::ALLREDUCE, t);
  }
  c10::intrusive_ptr<Work> reduce(std::vector<Tensor>& t, const ReduceOptions& o) override {
    auto h = host(t);
    auto p = o;
    bool a = avg(p.reduceOp);
    in->reduce(h, p)->wait();
    if (a && getRank() == o.rootRank)
      for (auto& x : h) x.div_(getSize());
    return done("reduce", OpType::REDUCE, t);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& t,
                                     const AllgatherOptions& o) override {
    auto h = host(t);
    auto q = host(out);
    in->allgather(q, h, o)->wait();
    return done("allgather", OpType::ALLGATHER);
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& t,
                                           const AllgatherOptions& o) override {
    auto h = host(t).view(-1), q = host(out).view(-1);
    in->_allgather_base(q, h, o)->wait();
    return done("allgather_base", OpType::_ALLGATHER_BASE, {out});
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(std::vector<Tensor>& out,
                                                           std::vector<Tensor>& t,
                                                           const AllgatherOptions& o) override {
    for (size_t i = 0; i < t.size(); i++) _allgather_base(out[i], t[i], o);
    return done("allgather_coalesced", OpType::_ALLGATHER_BASE, out);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& t,
                                                const ReduceScatterOptions& o) override {
    auto h = host(t).clone(), q = host(out);
    ReduceOp op = o.reduceOp;
    bool a = avg(op);
    std::vector<Tensor> one{h};
    AllreduceOptions p;
    p.reduceOp = op;
    in->allreduce(one, p)->wait();
    auto n = q.numel();
    q.copy_(h.view(-1).narrow(0, n * getRank(), n).view(q.sizes()));
    if (a) q.div_(getSize());
    return done("reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE, {out});
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(std::vector<Tensor>& out,
                                                           std::vector<Tensor>& t,
                                                           const ReduceScatterOptions& o) override {
    for (size_t i = 0; i < t.size(); i++) _reduce_scatter_base(out[i], t[i], o);
    return done("reduce_scatter_coalesced", OpType::_REDUCE_SCATTER_BASE, out);
  }
  c10::intrusive_ptr<Work> reduce_scatter(std::vector<Tensor>& out,
                                          std::vector<std::vector<Tensor>>& t,
                                          const ReduceScatterOptions& o) override {
    for (size_t i = 0; i < out.size(); i++) {
      std::vector<Tensor> f;
      for (auto& x : t[i]) f.push_back(host(x).flatten());
      auto all = at::cat(f);
      std::vector<Tensor> one{all};
      AllreduceOptions p;
      ReduceOp op = o.reduceOp;
      bool a = avg(op);
      p.reduceOp = op;
      in->allreduce(one, p)->wait();
      int64_t off = 0;
      for (int r = 0; r < getRank(); r++) off += f[r].numel();
      auto q = host(out[i]);
      q.copy_(all.narrow(0, off, q.numel()).view(q.sizes()));
      if (a) q.div_(getSize());
    }
    return done("reduce_scatter", OpType::REDUCE_SCATTER, out);
  }
  c10::intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& t, std::vector<int64_t>& a,
                                         std::vector<int64_t>& b,
                                         const AllToAllOptions& o) override {
    auto h = host(t), q = host(out);
    in->alltoall_base(q, h, a, b, o)->wait();
    return done("alltoall", OpType::ALLTOALL_BASE, {out});
  }
  c10::intrusive_ptr<Work> gather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& t,
                                  const GatherOptions& o) override {
    auto h = host(t);
    auto q = host(out);
    in->gather(q, h, o)->wait();
    return done("gather", OpType::GATHER);
  }
  c10::intrusive_ptr<Work> scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& t,
                                   const ScatterOptions& o) override {
    auto q = host(out);
    auto h = host(t);
    in->scatter(q, h, o)->wait();
    return done("scatter", OpType::SCATTER);
  }
  c10::intrusive_ptr<Work> send(std::vector<Tensor>& t, int d, int g) override {
    auto h = host(t);
    in->send(h, d, g)->wait();
    return done("send", OpType::SEND);
  }
  c10::intrusive_ptr<Work> recv(std::vector<Tensor>& t, int s, int g) override {
    auto h = host(t);
    in->recv(h, s, g)->wait();
    return done("recv", OpType::RECV);
  }
  c10::intrusive_ptr<Work> barrier(const BarrierOptions& o) override {
    BarrierOptions p;
    in->barrier(p)->wait();
    return done("barrier", OpType::BARRIER);
  }
};
}  // namespace
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("torch.distributed");
  m.def("make",
        [](int rank, int size,
           const c10::intrusive_ptr<Backend>& inner) -> c10::intrusive_ptr<Backend> {
          return c10::make_intrusive<Pretend>(rank, size, inner);
        });
  m.def("counts",
        [](const c10::intrusive_ptr<Backend>& b) { return dynamic_cast<Pretend&>(*b).count; });
}
