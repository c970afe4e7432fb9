from __future__ import annotations
import operator
from dataclasses import dataclass, field
import torch
from torch import nn, fx
@dataclass(frozen=True)
class Block:
    conv: str
    norm: str | None
    adds: bool
    activation: str
    activation_module: str | None
    ends: str
    feeds_conv: bool
    feeds_other: bool
    consumers: tuple
@dataclass(frozen=True)
class Plan:
    blocks: dict = field(default_factory=dict)
    reasons: dict = field(default_factory=dict)
ACTS={nn.ReLU:"relu",nn.ReLU6:"relu6",nn.Hardswish:"hardswish",nn.SiLU:"silu"}
def find_blocks(model):
    m=dict(model.named_modules()); g=fx.Tracer().trace(model); plan=Plan()
    mod=lambda n: m[n.target] if n.op=="call_module" else None
    taken=set()
    for n in g.nodes:
        if not isinstance(mod(n),(nn.Conv1d,nn.Conv2d,nn.Conv3d)): continue
        cur,norm,adds,act,am,ends=n,None,False,"none",None,"conv"
        def nxt():
            u=list(cur.users)
            return u[0] if len(u)==1 else None
        u=nxt()
        if u is not None and isinstance(mod(u),(nn.BatchNorm1d,nn.BatchNorm2d,nn.BatchNorm3d)): norm,cur,ends=u.target,u,"norm"
        u=nxt()
        if u is not None and u.op=="call_function" and u.target in (operator.add,operator.iadd,torch.add) and u not in taken and all(isinstance(a,fx.Node) for a in u.args) and norm and not n.target.startswith("downsample") and "downsample" not in n.target:
            taken.add(u); adds,cur,ends=True,u,"add"
        u=nxt()
        if u is not None and type(mod(u)) in ACTS: act,am,cur,ends=ACTS[type(mod(u))],u.target,u,"activation"
        elif u is not None and u.op=="call_function" and u.target in (torch.nn.functional.relu,torch.relu): act,cur,ends="relu",u,"activation"
        if ends=="conv": plan.reasons[n.target]="x"; continue
        fc=any(isinstance(mod(v),(nn.Conv1d,nn.Conv2d,nn.Conv3d)) for v in cur.users)
        fo=any(not isinstance(mod(v),(nn.Conv1d,nn.Conv2d,nn.Conv3d)) for v in cur.users)
        plan.blocks[n.target]=Block(n.target,norm,adds,act,am,ends,fc,fo,())
    return plan
