from rtkernels.runtime.operator.declared import Primitive as Primitive
from rtkernels.runtime.operator.plan import Memory as Memory
