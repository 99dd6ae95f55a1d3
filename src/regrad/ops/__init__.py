"""The op sheets, one file per family. Importing a family registers its op types.

Few programs need some of the families. regrad imports such a family on the first use of one of
its op types or functions.
"""

from regrad.core.registry import OPS as _OPS

# The op types of the families that are imported late. Their names are known from the start.
_LATE = {
    "activation": "Elu Gelu LeakyRelu LogSigmoid LogSoftmax Prelu Relu Relu6 Selu Sigmoid Silu "
    "Softmax Softplus Softsign",
    "convolution": "Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D "
    "Conv3DBackpropFilterV2 Conv3DBackpropInputV2 DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput",
    "cross_entropy": "SparseSoftmaxCrossEntropyWithLogits",
    "decompositions": "Cholesky LogMatrixDeterminant MatrixCofactors MatrixCofactorsChange "
    "MatrixDeterminant MatrixExponential MatrixExponentialChange MatrixInverse "
    "MatrixPseudoInverse MatrixRank MatrixSolve MatrixTriangularSolve Qr QuotientOrZero",
    "fourier": "FFT HermitianWeights IFFT IRFFT RFFT ResizeAxis",
    "image": "BatchToSpaceND Dilation2D Dilation2DArgmax ResizeBilinear ResizeBilinearGrad "
    "ResizeNearestNeighbor ResizeNearestNeighborGrad SpaceToBatchND TapGather TapScatter",
    "indices": "OneHot Unique UniqueValues Where",
    "pooling": "AvgPool AvgPool3D AvgPoolGrad LRN MaxPool MaxPool3D MaxPoolGrad MaxPoolGradGrad "
    "NeighbourSum",
    "special": "NanToNum Sinc SincDerivative Xdivy Xlogy",
    "spectral": "NanWhere SelfAdjointEigV2 SelfAdjointEigvals SelfAdjointEigvalsGrad "
    "SingularValues SingularValuesGrad Svd",
}  # fmt: skip
_OPS.late |= {t: f"regrad.ops.{sheet}" for sheet, types in _LATE.items() for t in types.split()}
