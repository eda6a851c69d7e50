"""The program that teaches NVSHMEM, line for line in our words.

bireme run -n 2 examples/02_nvshmem_hello.py
"""

import bireme as bm

world = bm.init()  #                                      nvshmem_init();
mype = world.rank  #                                      int mype = nvshmem_my_pe();
npes = world.size  #                                      int npes = nvshmem_n_pes();
n = 1024
source = world.symmetric.empty(n, "float32")  #           float *source = nvshmem_malloc(4 * n);
dest = world.symmetric.zeros(n, "float32")  #             float *dest = nvshmem_malloc(4 * n);
source.local[:] = mype + 1  #                             fill
if mype == 0 and npes > 1:
    dest.put(source, peer=1)  #                           nvshmem_float_put(dest, source, n, 1);
    world.quiet()  #                                      nvshmem_quiet();
world.barrier()  #                                        nvshmem_barrier_all();
if mype == 1:
    assert (dest.local == 1).all()
    print(f"rank {mype}: dest[0] = {dest.local[0]}, put by rank 0")
source.free()  #                                          nvshmem_free(source);
dest.free()  #                                            nvshmem_free(dest);
world.close()  #                                          nvshmem_finalize();
