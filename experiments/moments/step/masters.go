package main

import (
	"maps"
	"math"
	"slices"
)

// rounding rounds the master weight of an element after a step.
type rounding func(master float32, step, element uint32) float32

// roundings are the ways to hold master weights beside bf16 parameters. Masters of 24 bits are a bf16 parameter and a
// byte: the upper 24 bits of an fp32 number.
var roundings = map[string]rounding{
	"split":     nil, // 32 bits
	"split24":   atRandom,
	"nearest24": toNearest,
	"bf16":      parameterOnly,
	"control":   once,
}

func roundedMasters() []string { return slices.Sorted(maps.Keys(roundings)) }

// atRandom rounds to 24 bits: up with a chance of the part that is cut off. The random number is a function of step
// and element.
func atRandom(master float32, step, element uint32) float32 {
	return cut(master, 8, random(step, element)&0xff)
}

// toNearest rounds to 24 bits, halves away from zero.
func toNearest(master float32, _, _ uint32) float32 { return cut(master, 8, 0x80) }

// parameterOnly keeps no more than the parameter.
func parameterOnly(master float32, _, _ uint32) float32 { return cut(master, 16, 0x8000) }

// once changes the 24-bit digits of a training's first step, and nothing later. It shows how far apart two trainings
// end whose weights differ once by as little.
func once(master float32, step, element uint32) float32 {
	if step > 1 {
		return master
	}
	return atRandom(master, step, element)
}

// cut adds to the lowest bits of a number and sets them to 0.
func cut(x float32, bits int, added uint32) float32 {
	return math.Float32frombits((math.Float32bits(x) + added) &^ (1<<bits - 1))
}

// random is the middle of the square of a sequence over the elements that begins at a place of its own in every step.
func random(step, element uint32) uint32 {
	x := scramble(step) + element*0x9e3779b9
	return x * x >> 16
}

// scramble is the finalizer of MurmurHash3.
func scramble(x uint32) uint32 {
	x ^= x >> 16
	x *= 0x85ebca6b
	x ^= x >> 13
	x *= 0xc2b2ae35
	return x ^ x>>16
}
