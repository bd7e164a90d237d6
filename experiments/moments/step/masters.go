package main

import (
	"maps"
	"math"
	"slices"

	"plimsoll/internal/state/optim/kernel"
)

// masters is a way to hold master weights beside bf16 parameters.
type masters struct {
	state kernel.State
	// round rounds a master weight after a step; nil for none.
	round func(master float32, step int64) float32
}

// allMasters are the ways that there are.
var allMasters = map[string]masters{
	"split":     {kernel.Split, nil},       // 32 bits
	"split24":   {kernel.Split24, nil},     // 24 bits, rounded at random
	"nearest24": {kernel.Split, toNearest}, // 24 bits
	"bf16":      {kernel.Split, parameterOnly},
	"control":   {kernel.Split, once},
}

func mastersNames() []string { return append(slices.Sorted(maps.Keys(allMasters)), "fp32") }

// toNearest rounds to 24 bits, halves away from zero.
func toNearest(master float32, _ int64) float32 { return kernel.RoundTo24(master) }

// parameterOnly keeps no more than the parameter.
func parameterOnly(master float32, _ int64) float32 {
	return math.Float32frombits((math.Float32bits(master) + 0x8000) &^ 0xffff)
}

// once rounds to 24 bits in a training's first step, and later nothing. It shows how far apart two trainings end whose
// weights have differed once by as little.
func once(master float32, step int64) float32 {
	if step > 1 {
		return master
	}
	return kernel.RoundTo24(master)
}
