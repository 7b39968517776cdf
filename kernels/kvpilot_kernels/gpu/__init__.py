"""GPU kernels over packed pages, in Triton and Gluon: store, plan, decode, reduce and gather.

Words of these modules:

- *Program*: one instance of a kernel, which is Triton's word for a thread block. A *warp* is 32 of its threads.
- *Row*: the stored key or value of one token and KV head. In modules about decode, a row is a query token of the step.
- *Code*: the stored integer of one element of a row. A *group* of codes shares a scale and a zero point.
- *Plane*: the codes that one AND extracts from all bytes, or words, of a row.
- *Slot*: the place of a token in the cache; in modules about layout, the place of an element in a row.
- *Tile*: consecutive tokens that a program processes at once.
- *Split*: consecutive tiles of one sequence. One program attends to one split. A *merge* joins the results of a
  sequence's splits.
- *Wave*: the largest number of splits that run at the same time. A *plan* has the splits of a step.
- *Residual*: refines a code to 8 bits in the recent window. Its *digits* are as wide as a code, and are packed like
  codes. *Residual pages* hold the residuals of one block.
"""
