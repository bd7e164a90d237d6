package optim_test

import "math"

// number is a value, and a bound on its distance from the result of a computation with
// some precision.
type number struct{ value, error float64 }

// arithmetic bounds the error of a computation as it goes along: a running
// error analysis (N. Higham, Accuracy and Stability of Numerical Algorithms,
// section 3.3). The value itself is computed in float64.
type arithmetic struct {
	unit float64 // bounds the relative error of an operation
	tiny float64 // bounds the error of an operation whose result is next to zero
}

var (
	binary64 = arithmetic{0x1p-53, 0x1p-1074}
	binary32 = arithmetic{0x1p-24, 0x1p-149}
	// flushing is the kernels' arithmetic, with denormals as zeros.
	flushing = arithmetic{0x1p-24, 0x1p-126}
)

// round rounds a result. Before, x.error is the error of its operands.
func (a arithmetic) round(x number) number {
	if x.value == 0 && x.error == 0 {
		return x
	}
	return number{x.value, x.error + a.unit*(math.Abs(x.value)+x.error) + a.tiny}
}

func (a arithmetic) constant(x float64) number { return a.round(number{value: x}) }

func (a arithmetic) add(x, y number) number {
	return a.round(number{x.value + y.value, x.error + y.error})
}

func product(x, y number) number {
	return number{x.value * y.value, math.Abs(x.value)*y.error + x.error*math.Abs(y.value) + x.error*y.error}
}

func (a arithmetic) mul(x, y number) number { return a.round(product(x, y)) }

func (a arithmetic) fma(x, y, z number) number {
	exact := product(x, y)
	return a.round(number{exact.value + z.value, exact.error + z.error})
}

func (a arithmetic) div(x, y number) number {
	quotient := x.value / y.value
	return a.round(number{quotient, (x.error + math.Abs(quotient)*y.error) / (math.Abs(y.value) - y.error)})
}

func (a arithmetic) sqrt(x number) number {
	root := math.Sqrt(x.value)
	// Largest below the value, where the root is steeper.
	return a.round(number{root, root - math.Sqrt(max(0, x.value-x.error))})
}

// keep is 1 + shrink, rounded when it is not 1.
func (a arithmetic) keep(shrink number) number {
	if shrink == (number{}) {
		return number{value: 1}
	}
	return a.round(binary64.add(number{value: 1}, shrink))
}

// sign may be any of -1, 0 and 1 when the error is as large as the value.
func sign(x number) number {
	switch {
	case x == number{}:
		return x
	case math.Abs(x.value) <= x.error:
		return number{math.Copysign(1, x.value), 2}
	}
	return number{math.Copysign(1, x.value), 0}
}

// lerp is torch.lerp of ATen/native/Lerp.h.
func (a arithmetic) lerp(x, y, weight number) number {
	difference := a.add(y, number{-x.value, x.error})
	if weight.value < 0.5 {
		return a.add(x, a.mul(weight, difference))
	}
	rest := a.add(number{value: 1}, number{-weight.value, weight.error})
	return a.add(y, a.mul(number{-rest.value, rest.error}, difference))
}
