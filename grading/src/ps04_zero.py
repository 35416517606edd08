# %%
def stage3_gradients(comm, layers, shards, x, loss_gradient):
    """This rank's slices of the average gradients. No rank holds more than a layer or two at any time."""
    ### BEGIN SOLUTION
    inputs, grads = [x], []
    for layer, shard in zip(layers, shards, strict=True):
        weight = comm.all_gather(shard)
        inputs.append(layer.forward(weight, inputs[-1]))
        del weight
    grad = loss_gradient(inputs.pop())
    for layer, shard in zip(reversed(layers), reversed(shards), strict=True):
        weight = comm.all_gather(shard)
        grad, of_weight = layer.backward(weight, inputs.pop(), grad)
        grads.append(comm.reduce_scatter(of_weight, op="mean"))
        del weight, of_weight
    return grads[::-1]
    ### END SOLUTION
