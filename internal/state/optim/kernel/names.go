package kernel

import (
	"fmt"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/optim/kernel/abi"
)

// AlgorithmNames returns the names of the algorithms.
func AlgorithmNames() []string { return namesOf(abi.Algorithms) }

// StateNames returns the names of the representations of master weights.
func StateNames() []string { return namesOf(abi.States) }

// MomentNames returns the names of the types of moments.
func MomentNames() []string { return namesOf(abi.MomentTypes) }

// ParseAlgorithm returns the algorithm of a name.
func ParseAlgorithm(name string) (Algorithm, error) { return parse(name, abi.Algorithms) }

// ParseState returns the representation of master weights of a name.
func ParseState(name string) (State, error) { return parse(name, abi.States) }

// ParseMoments returns the type of moments of a name.
func ParseMoments(name string) (MomentType, error) { return parse(name, abi.MomentTypes) }

// enumeration is a type whose values count from 0.
type enumeration interface {
	~uint8
	fmt.Stringer
}

// namesOf returns the names of all values below an end.
func namesOf[T enumeration](end T) []string {
	var names []string
	for value := range end {
		names = append(names, value.String())
	}
	return names
}

// parse returns the value below an end that has a name.
func parse[T enumeration](name string, end T) (T, error) {
	names := namesOf(end)
	i := slices.Index(names, name)
	if i < 0 {
		return 0, fault.Unknown(name, names)
	}
	return T(i), nil
}

// numberTypes are the types that parameters and gradients can have.
var numberTypes = []dtype.Type{dtype.BF16, dtype.F16, dtype.F32}

// NumberTypeNames returns the short names of the types that parameters and gradients can have.
func NumberTypeNames() []string {
	var names []string
	for _, t := range numberTypes {
		names = append(names, t.String())
	}
	return names
}

// ParseNumberType returns the type of parameters or gradients of a short name.
func ParseNumberType(name string) (dtype.Type, error) {
	i := slices.Index(NumberTypeNames(), name)
	if i < 0 {
		return dtype.Invalid, fault.Unknown(name, NumberTypeNames())
	}
	return numberTypes[i], nil
}

// ParseNumberTypeAlias is ParseNumberType for users: it takes every name that dtype.Parse knows, such as bfloat16.
func ParseNumberTypeAlias(name string) (dtype.Type, error) {
	if t, err := dtype.Parse(name); err == nil && slices.Contains(numberTypes, t) {
		return t, nil
	}
	return ParseNumberType(name)
}
