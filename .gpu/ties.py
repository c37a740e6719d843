import os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from knobs import *
import torch
from rtkernels import _registry
T0=time.time()
def flags(kernels, *fl):
    for k in kernels: k.flags=tuple(fl); k._functions.clear()
# 2. softmax
from rtkernels.ops import _softmax_plans as SP
import rtkernels
@guard
def soft():
    show("softmax ring","softmax_fwd","softmax_bwd")
    orig=SP._bind
    def make(ch,tmax):
        def bind(kernels,t,rows,cols,device,full,inputs,log):
            vectors=cols//SP._WIDTH[t]; threads=SP.group_threads(-(-vectors//ch),tmax); block=SP.block_of(threads)
            return kernels[0].bind((t,ch,log),device,-(-rows//(block//threads)),block),(threads,),()
        return bind
    xs={n:torch.randn(8192,n,device=dev,dtype=torch.bfloat16) for n in (1536,1000*8//8,2048,3072,5120,7168,8192,16384)}
    def sweep(tag,only=None):
        out=[]
        Plans.forget_all()
        for n,x in xs.items():
            if only and n not in only: continue
            y=torch.softmax(x,-1); dy=x.flip(0).contiguous()
            us=timeit(lambda:rtkernels.softmax(x)); c=copy_us(x.numel()*4); out.append(f"{n}: {us:.1f}({c/us:.3f})")
        print(tag,"fwd",*out,flush=True)
    sweep("base")
    for ch,t,b,keep in ((4,1024,1,4),(4,1024,2,0),(8,512,2,4),(8,512,1,8),(4,512,2,4),(4,512,3,0),(4,512,4,0),(2,512,2,4),(1,512,2,4),(3,512,2,4)):
        flags([SP._FWD[0],SP._BWD[0]],f"-DSM_T={t}",f"-DSM_B={b}",f"-DKEEP={keep}")
        SP._bind=make(ch,t)
        show(f"softmax chunks{ch} {t},{b} keep{keep}",*( ("softmax_fwd 8192x32768","softmax_bwd 8192x32768") if ch*t*8>=32768 else () ), "softmax_fwd 8192x4096","softmax_bwd 8192x4096")
        sweep(f"chunks{ch} {t},{b} keep{keep}",[n for n in xs if n<=ch*t*8])
    SP._bind=orig; flags([SP._FWD[0],SP._BWD[0]])
# 4. dequant
from rtkernels.ops import _fp8_kernels as FK
A="q:ptr scale:ptr y:ptr count:i64 shift:i64"
flat=Kernel("quant/dequantize_fp8.cu","dequantize_fp8_flat",template="T F8 FLIGHT",args=A,variants=[],max_registers=255)
one=Kernel("quant/dequantize_fp8.cu","dequantize_fp8_one",template="T F8 FLIGHT THREADS",args=A,variants=[],max_registers=255)
@guard
def deq():
    show("deq base","dequantize_fp8_group")
    for n in (2048,4096,8192):
        r=[r for r in rows if r.name=="dequantize_fp8_group" and r.shape==f"8192x{n}"][0]
        inp=r.make(dev,torch.Generator(device=dev).manual_seed(0)); q,s=inp["q"],inp["scale"]; x=ref=r.ours(**inp)
        y=torch.empty_like(x); c=copy_us(x.numel()*3+s.numel()*4); out=[]
        for tag,k,var,per,th in [(f"flat{f}",flat,("bf16","e4m3",f),16*f*256,256) for f in (1,2,4)]+[(f"one{f}x{th}",one,("bf16","e4m3",f,th),8*f*th,th) for f in (1,2,4,8) for th in (128,256)]:
            l=k.bind(var,0,-(-x.numel()//per),th); y.fill_(7)
            fn=lambda: l(q.data_ptr(),s.data_ptr(),y.data_ptr(),x.numel(),7)
            fn(); ok=torch.equal(y,ref); us=timeit(fn); out.append(f"{tag} {us:.1f}({c/us:.3f}){'' if ok else ' WRONG'}")
        print("deq",n," ".join(out),flush=True)
print("total",time.time()-T0)

from rtkernels.ops import _fp8_plans as FP
@guard
def static():
    show("static base","quantize_fp8_static","quantize_fp8_group 8192","dequantize")
    for f in (2,1):
        flags([FK.TENSOR,FK.BACK],f"-DRUN_F={f}")
        FP.Matrix._in_flight=property(lambda self,f=f: 8 if self.vec==1 else f)
        show(f"static flight{f}","quantize_fp8_static","dequantize")
