// A CUDA device of host memory, for a torch that was built without CUDA.
//
// Tensors on it are real CUDA tensors: dispatch keys, device, guards and autograd are those of torch. Their memory is
// ordinary host memory, and torch's own operators run as their CPU kernels on it (`run_on_cpu`). The Python side is
// `__init__.py` in this folder.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

// Of torch/csrc/autograd/python_variable.h, which takes longer to compile than all the rest.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// ---- memory --------------------------------------------------------------------------------------------------------

constexpr size_t kAlignment = 512;  // that of torch's CUDA allocator
bool poison_new_memory = false;
bool remember_blocks = false;

// Blocks are reused by size, as torch's CUDA allocator reuses them: a call must not pay for mmap and page faults.
struct Blocks {
    std::mutex lock;
    std::unordered_map<size_t, std::vector<char*>> unused;
    std::map<uintptr_t, size_t> used;  // only if `remember_blocks`: launches look up where an address points to

    static size_t rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

    void* take(size_t bytes) {
        std::lock_guard<std::mutex> guard(lock);
        auto& same_size = unused[rounded(bytes)];
        char* base = nullptr;
        if (same_size.empty()) {
            base = static_cast<char*>(std::aligned_alloc(kAlignment, rounded(bytes) + kAlignment));
            TORCH_CHECK(base != nullptr, "the stand-in device is out of host memory");
        } else {
            base = same_size.back();
            same_size.pop_back();
        }
        std::memcpy(base, &bytes, sizeof bytes);  // in front of the block
        char* block = base + kAlignment;
        if (remember_blocks) used[reinterpret_cast<uintptr_t>(block)] = bytes;
        if (poison_new_memory) {  // NaN in fp32, bf16 and fp16, and no sensible index, as the emulator does
            for (size_t i = 0; i < bytes; ++i) block[i] = static_cast<char>(i % 2 ? 0x7F : 0xF5);
        }
        return block;
    }

    void give_back(void* block) {
        std::lock_guard<std::mutex> guard(lock);
        char* base = static_cast<char*>(block) - kAlignment;
        size_t bytes = 0;
        std::memcpy(&bytes, base, sizeof bytes);
        used.erase(reinterpret_cast<uintptr_t>(block));
        unused[rounded(bytes)].push_back(base);
    }
};

Blocks& blocks() {
    static Blocks* all = new Blocks;  // never destroyed: tensors may outlive static objects
    return *all;
}

void give_back(void* block) {
    if (block != nullptr) blocks().give_back(block);
}

struct Memory final : c10::Allocator {
    c10::Device device;
    explicit Memory(c10::Device device) : device(device) {}
    c10::DataPtr allocate(size_t bytes) override {
        void* block = bytes ? blocks().take(bytes) : nullptr;
        return {block, block, &give_back, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

Memory memory(kDevice);
Memory pinned_memory{c10::Device(c10::DeviceType::CPU)};  // kernels may write to it, as to pinned memory
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &memory)

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

at::Tensor empty_strided_cuda(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype) {
    return at::Tensor(at::detail::empty_strided_generic(size, stride, &memory, kKeys, dtype));
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::Tensor(at::detail::empty_generic(
        size, &memory, kKeys, dtype.value_or(at::get_default_dtype_as_scalartype()), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
    return empty_strided_cuda(size, stride, dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// ---- what torch asks of a device -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
    c10::DeviceType type() const override { return static_type; }
    c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
    c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
    c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
    c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeEvent(void*) const override {}
    void synchronizeDevice(const c10::DeviceIndex) const override {}
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    int getNumGPUs() const override { return 1; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex current_device() const override { return 0; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    void deviceSynchronize(c10::DeviceIndex) const override {}
};

// Torch has made its own hooks by the time it is imported, and keeps them. They have no members: the table of virtual
// functions is all there is to replace.
void replace_hooks() {
    static Hooks ours;
    static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*));
    auto* torchs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
    std::memcpy(static_cast<void*>(torchs), static_cast<void*>(&ours), sizeof(void*));
}

// ---- torch's own operators -----------------------------------------------------------------------------------------

at::Tensor as_cpu(const at::Tensor& t) {
    c10::Storage storage = t.storage();
    auto* kept = new c10::Storage(storage);
    c10::DataPtr data(
        storage.mutable_data(), kept, [](void* p) { delete static_cast<c10::Storage*>(p); }, at::Device(at::kCPU));
    auto impl = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
        /*resizable=*/true);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(impl)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj()) made._set_conj(true);
    if (t.is_neg()) made._set_neg(true);
    return made;
}

at::Tensor over(const c10::Storage& storage, const at::Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), kKeys, like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
}

at::Tensor as_cuda(const at::Tensor& t) {  // of a result on the CPU: a copy
    const size_t bytes = t.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory.allocate(bytes), &memory, true);
    if (bytes) std::memcpy(storage.mutable_data(), t.storage().data(), bytes);
    return over(storage, t);
}

struct Given {
    at::Tensor cuda, cpu;
};

at::Tensor given_as_cpu(const at::Tensor& t, std::vector<Given>& given) {
    if (!t.defined() || !t.is_cuda()) return t;
    for (auto& one : given)
        if (one.cuda.is_same(t)) return one.cpu;
    // Views of one storage must be views of one storage on the CPU, where kernels look for overlaps.
    at::Tensor cpu = as_cpu(t);
    for (auto& one : given) {
        if (one.cuda.storage().is_alias_of(t.storage())) {
            cpu.unsafeGetTensorImpl()->set_storage_keep_dtype(one.cpu.storage());
            break;
        }
    }
    given.push_back({t, cpu});
    return cpu;
}

at::Tensor result_as_cuda(const at::Tensor& made, std::vector<Given>& given) {
    if (!made.defined()) return made;
    for (auto& one : given)
        if (one.cpu.is_same(made)) return one.cuda;
    for (auto& one : given)
        if (one.cpu.storage().is_alias_of(made.storage())) return over(one.cuda.storage(), made);
    return as_cuda(made);
}

bool follow_resize(Given& one) {
    const bool moved = one.cpu.storage().nbytes() != one.cuda.storage().nbytes();
    if (moved) {
        at::Tensor copied = as_cuda(one.cpu);
        one.cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(copied.storage());
    }
    const bool reshaped = one.cpu.sizes() != one.cuda.sizes() || one.cpu.strides() != one.cuda.strides();
    if (moved || reshaped)
        one.cuda.unsafeGetTensorImpl()->set_sizes_and_strides(
            one.cpu.sizes(), one.cpu.strides(), one.cpu.storage_offset());
    return moved || reshaped;
}

// Host times are those of a device that computes by itself. So an operator that was called before with tensors of the
// same layouts and the same other arguments only allocates its results, if `skip_known_calls` says so.
bool skip_known_calls = false;

struct Layout {
    c10::SmallVector<int64_t, 5> sizes, strides;
    at::ScalarType dtype;
};

struct KnownCall {
    std::vector<std::variant<size_t, Layout>> results;  // an argument that is returned, or the layout of a new tensor
};

template <typename T>
void add_bytes(std::string& key, const T& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void add_layout(std::string& key, const at::Tensor& t) {
    key.push_back('T');
    if (!t.defined()) return;
    add_bytes(key, t.scalar_type());
    add_bytes(key, t.device().type());
    for (int64_t n : t.sizes()) add_bytes(key, n);
    key.push_back(',');
    for (int64_t n : t.strides()) add_bytes(key, n);
}

bool add_to_key(std::string& key, const c10::IValue& value) {
    key.push_back(';');
    if (value.isTensor()) {
        add_layout(key, value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor& t : value.toTensorVector()) add_layout(key, t);
    } else if (value.isNone()) {
        key.push_back('n');
    } else if (value.isInt()) {
        add_bytes(key, value.toInt());
    } else if (value.isDouble()) {
        add_bytes(key, value.toDouble());
    } else if (value.isBool()) {
        key.push_back(value.toBool() ? 't' : 'f');
    } else if (value.isDevice()) {
        add_bytes(key, value.toDevice().type());
    } else if (value.isString()) {
        key += value.toStringRef();
    } else if (value.isIntList()) {
        for (int64_t n : value.toIntVector()) add_bytes(key, n);
    } else {
        return false;
    }
    return true;
}

// Returns "" for a call whose results depend on values, or that is not understood.
std::string key_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
    if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) return "";
    std::string key = op.operator_name().name + "." + op.operator_name().overload_name;
    for (size_t i = first; i < stack.size(); ++i)
        if (!add_to_key(key, stack[i])) return "";
    return key;
}

struct KnownCalls {
    std::mutex lock;
    std::unordered_map<std::string, KnownCall> calls;
};

KnownCalls& known_calls() {
    static KnownCalls* all = new KnownCalls;
    return *all;
}

bool repeat(const std::string& key, torch::jit::Stack* stack, size_t first) {
    const KnownCall* known = nullptr;
    {
        std::lock_guard<std::mutex> guard(known_calls().lock);
        auto found = known_calls().calls.find(key);
        if (found == known_calls().calls.end()) return false;
        known = &found->second;  // elements stay where they are
    }
    torch::jit::Stack results;
    for (const auto& one : known->results) {
        if (const size_t* argument = std::get_if<size_t>(&one)) {
            results.push_back((*stack)[first + *argument]);
        } else {
            const Layout& layout = std::get<Layout>(one);
            results.emplace_back(empty_strided_cuda(layout.sizes, layout.strides, layout.dtype));
        }
    }
    stack->resize(first);
    for (auto& result : results) stack->push_back(std::move(result));
    return true;
}

void learn(const std::string& key, const torch::jit::Stack& arguments, const torch::jit::Stack& stack, size_t results) {
    KnownCall call;
    for (size_t i = stack.size() - results; i < stack.size(); ++i) {
        if (!stack[i].isTensor() || !stack[i].toTensor().is_cuda()) return;
        const at::Tensor& t = stack[i].toTensor();
        bool is_new = true;
        for (size_t j = 0; j < arguments.size(); ++j) {
            if (!arguments[j].isTensor() || !arguments[j].toTensor().defined()) continue;
            const at::Tensor& given = arguments[j].toTensor();
            if (given.is_same(t)) {
                call.results.emplace_back(j);
                is_new = false;
                break;
            }
            if (given.is_cuda() && given.storage().is_alias_of(t.storage())) return;  // a view
        }
        if (is_new) {
            Layout layout;
            layout.sizes.append(t.sizes().begin(), t.sizes().end());
            layout.strides.append(t.strides().begin(), t.strides().end());
            layout.dtype = t.scalar_type();
            call.results.emplace_back(std::move(layout));
        }
    }
    std::lock_guard<std::mutex> guard(known_calls().lock);
    known_calls().calls.emplace(key, std::move(call));
}

// Runs an operator on the same memory as its CPU kernel does.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t first = stack->size() - schema.arguments().size();
    std::string key;
    torch::jit::Stack arguments;
    if (skip_known_calls) {
        key = key_of(op, *stack, first);
        if (!key.empty() && repeat(key, stack, first)) return;
        arguments.assign(stack->begin() + first, stack->end());
    }
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<Given> given;
    const bool copies_over = schema.name() == "aten::_to_copy";
    bool to_cpu = false;  // `_copy_from` and the like: an argument says where results are
    for (size_t i = first; i < stack->size(); ++i) {
        c10::IValue& value = (*stack)[i];
        if (value.isTensor()) {
            value = given_as_cpu(value.toTensor(), given);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& t : value.toTensorVector()) list.push_back(given_as_cpu(t, given));
            value = std::move(list);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
                list.push_back(t.has_value() ? std::optional<at::Tensor>(given_as_cpu(*t, given)) : std::nullopt);
            value = std::move(list);
        } else if (value.isDevice()) {
            to_cpu = copies_over && value.toDevice().is_cpu();
            value = c10::Device(c10::kCPU);
        }
    }
    op.callBoxed(stack);
    bool resized = false;
    for (auto& one : given) resized |= follow_resize(one);
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
        c10::IValue& value = (*stack)[i];
        if (to_cpu) continue;
        if (value.isTensor()) {
            value = result_as_cuda(value.toTensor(), given);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& t : value.toTensorVector()) list.push_back(result_as_cuda(t, given));
            value = std::move(list);
        }
    }
    if (!key.empty() && !resized) learn(key, arguments, *stack, schema.returns().size());
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
    if (skip_known_calls && self.is_cuda() && from.is_cuda()) return self;
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor to = self.is_cuda() ? as_cpu(self) : self;
    to.copy_(from.is_cuda() ? as_cpu(from) : from);
    return self;
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("copy_", &copy_);
    m.impl("record_stream", &record_stream);
}

// ---- Python --------------------------------------------------------------------------------------------------------

unsigned long long launches = 0;

PyObject* python_empty_strided(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_CheckExact(args[0]) || !PyTuple_CheckExact(args[1]) || !THPDtype_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected two tuples and a dtype");
        return nullptr;
    }
    c10::SmallVector<int64_t, 8> dims[2];
    for (int i = 0; i < 2; ++i)
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(args[i]); ++j) {
            const int64_t n = PyLong_AsLongLong(PyTuple_GET_ITEM(args[i], j));
            if (n == -1 && PyErr_Occurred()) return nullptr;
            dims[i].push_back(n);
        }
    try {
        return THPVariable_Wrap(
            empty_strided_cuda(dims[0], dims[1], reinterpret_cast<THPDtype*>(args[2])->scalar_type));
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

// Any launch function of the driver: counts, and answers "success".
PyObject* python_launch(PyObject*, PyObject* const*, Py_ssize_t) {
    ++launches;
    return PyLong_FromLong(0);
}

PyObject* python_launches(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(launches); }

PyObject* python_block_of(PyObject*, PyObject* address) {
    const unsigned long long wanted = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred()) return nullptr;
    Blocks& all = blocks();
    std::lock_guard<std::mutex> guard(all.lock);
    auto after = all.used.upper_bound(wanted);
    if (after == all.used.begin()) Py_RETURN_NONE;
    --after;
    if (wanted > after->first + after->second) Py_RETURN_NONE;
    return Py_BuildValue("KK", (unsigned long long)after->first, (unsigned long long)after->second);
}

PyObject* python_check_memory(PyObject*, PyObject* on) {
    poison_new_memory = remember_blocks = PyObject_IsTrue(on) == 1;
    Py_RETURN_NONE;
}

PyObject* python_skip_known_calls(PyObject*, PyObject* on) {
    skip_known_calls = PyObject_IsTrue(on) == 1;
    Py_RETURN_NONE;
}

// Registers `run_on_cpu` for operators of aten that have a CPU kernel, all but those above. In a CUDA build, it replaces
// torch's own kernels.
PyObject* python_take_cpu_kernels(PyObject*, PyObject*) {
    static std::unique_ptr<torch::Library> library;
    if (library) Py_RETURN_NONE;
    library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    static const std::set<std::string> own = {"aten::empty", "aten::empty_strided", "aten::as_strided", "aten::view",
                                              "aten::copy_", "aten::record_stream"};
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        if (name.name.compare(0, 6, "aten::") != 0) continue;
        auto op = dispatcher.findOp(name);
        if (!op.has_value() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || own.count(name.name)) continue;
        const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
        library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"empty_strided_cuda", reinterpret_cast<PyCFunction>(python_empty_strided), METH_FASTCALL, nullptr},
    {"launch", reinterpret_cast<PyCFunction>(python_launch), METH_FASTCALL, nullptr},
    {"launches", python_launches, METH_NOARGS, nullptr},
    {"block_of", python_block_of, METH_O, nullptr},
    {"check_memory", python_check_memory, METH_O, nullptr},
    {"skip_known_calls", python_skip_known_calls, METH_O, nullptr},
    {"take_cpu_kernels", python_take_cpu_kernels, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "rtkernels_stand_in", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_rtkernels_stand_in() {
    replace_hooks();
    return PyModule_Create(&module);
}
