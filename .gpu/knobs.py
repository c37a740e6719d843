import os, sys, statistics as st, time
os.environ.setdefault("RTKERNELS_CACHE_DIR", "/tmp/rtkcache"); sys.path.insert(0, ".")
import torch, rtkernels
from rtkernels._kernel import Kernel, Plans
from rtkernels import _registry
dev="cuda"
flush=torch.empty(64*1024*1024,device=dev,dtype=torch.float32)
def timeit(fn,n=15):
    fn(); fn(); torch.cuda.synchronize()
    ev=[(torch.cuda.Event(True),torch.cuda.Event(True)) for _ in range(n)]
    torch.cuda._sleep(6000000)
    for a,b in ev:
        flush.zero_(); a.record(); fn(); b.record()
    torch.cuda.synchronize()
    return st.median(a.elapsed_time(b)*1e3 for a,b in ev)
copies={}
def copy_us(nbytes):
    n=-(-nbytes//2//65536)*65536
    if n not in copies:
        a=torch.empty(n,device=dev,dtype=torch.uint8).random_(); b=torch.empty_like(a); copies[n]=min(timeit(lambda:b.copy_(a)),timeit(lambda:b.copy_(a)))
    return copies[n]
rows=[r for op in _registry.ops() for r in op.rows()]
def show(tag,*names,setup=None):
    Plans.forget_all()
    out=[]
    for r in rows:
        if any(f"{r.name} {r.shape}".startswith(n) for n in names):
            g=torch.Generator(device=dev).manual_seed(0); inp=r.make(dev,g)
            try:
                us=timeit(lambda:r.ours(**inp)); c=copy_us(r.bytes); out.append(f"{r.name} {r.shape} {us:.1f} ({c/us:.3f})")
            except Exception as e: out.append(f"{r.name} {r.shape} FAILED {str(e)[:120]}")
            del inp
    print(f"{tag}: "+"; ".join(out),flush=True)
def guard(f):
    try: f()
    except Exception as e: print("FAILED",f.__name__,type(e).__name__,str(e)[:300],flush=True)
if __name__=="__main__":
    skip=("adamw","grad_norm","multi_scale","clip")
    show("all",*[f"{r.name} {r.shape}" for r in rows if not r.name.startswith(skip)])
    from rtkernels.ops import _norm_quant_plans as NQ
    t0=NQ._TOGETHER_BYTES
    @guard
    def nq():
        for tb,ahead,sb in ((1<<40,3,128<<10),(24<<20,2,128<<10),(24<<20,4,128<<10),(24<<20,6,128<<10),(24<<20,3,64<<10),(24<<20,2,64<<10)):
            NQ._TOGETHER_BYTES,NQ._AHEAD_PER_SM,NQ._STATS_BYTES=tb,ahead,sb
            show(f"norm together>{tb>>20}MB ahead{ahead} stats{sb>>10}K","rms_norm_fp8_both","rms_norm_fp8_t")
        NQ._TOGETHER_BYTES,NQ._AHEAD_PER_SM,NQ._STATS_BYTES=t0,3,128<<10
    from rtkernels.ops import _glu_fp8_plans as GP
    @guard
    def glu():
        for s in ({2:1,3:1},{2:2,3:2}):
            GP._STAGES.update(s); show(f"glu_fp8 stages {s}","glu_fp8","expert_glu_fp8")
        GP._STAGES.update({2:1,3:2})
    from rtkernels.ops import _gate_plans as GA, _layer_norm_plans as LP, _rms_norm_plans as RP
    @guard
    def gate():
        for ch,th,stg in ((1,512,4),(1,512,2),(2,512,2),(2,512,3)):
            GA._CHUNKS,GA._THREADS=ch,th; GA._stages=lambda limit,stg=stg: stg
            show(f"gate chunks{ch} thr{th} stages{stg}","gate_bwd b2s4096c2048g4")
    from rtkernels.ops import _embedding_plans as EP
    @guard
    def emb():
        for th in (64,128,256):
            EP._SUM_THREADS=th; show(f"embedding sum threads {th}","embedding_bwd")
    from rtkernels.ops import _multi_tables as MT
    @guard
    def multi():
        show("multi","grad_norm","multi_scale","clip","batch")
        for s in ((12,15),(12,17),(13,16)):
            MT._SHIFTS=s; show(f"multi shifts {s}","batch","grad_norm 512","grad_norm 5000")
