package recipe

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/peft"
	"plimsoll/internal/input/recipe/strict"
)

// LowRank says how GaLore and APOLLO project the gradients of linear modules.
type LowRank struct {
	Rank       int
	Projection string // the side of a matrix that is projected: "std", "reverse_std", "left", "right", "full" for both
	Random     bool   // APOLLO's projection: not of singular vectors
	ByChannel  bool   // APOLLO scales the gradient of each channel
	Head       bool   // the output head may be projected, too
	All        bool   // all linear modules are projected, or else those with one of Targets in their paths
	Targets    []string
	Place      fault.Position

	patterns []*regexp.Regexp
}

// NewLowRank returns the defaults of transformers' Trainer, for all linear modules.
func NewLowRank(apollo bool) *LowRank {
	return &LowRank{Rank: 128, Projection: "std", Random: apollo, ByChannel: apollo, Head: true, All: true}
}

// Has reports whether the gradient of a linear module is projected.
func (l *LowRank) Has(module string) bool {
	switch {
	case !l.Head && peft.IsHead(module):
		return false
	case l.All:
		return true
	}
	return slices.ContainsFunc(l.Targets, func(part string) bool { return strings.Contains(module, part) }) ||
		slices.ContainsFunc(l.patterns, func(p *regexp.Regexp) bool { return p.MatchString(module) })
}

// LowRankProjections are the sides that GaLore knows.
var LowRankProjections = strings.Fields("std reverse_std right left full")

// lowRank reads optim_args and optim_target_modules: _setup_low_rank_optimizer in trainer_optimizer.py, and
// check_target_module_exists in trainer_utils.py of transformers 5.23.
func (r *trainingReader) lowRank(apollo bool) (*LowRank, error) {
	const arguments, targets = "optim_args", "optim_target_modules"
	l := NewLowRank(apollo)
	l.Place, l.All = r.Place("optim"), false
	for pair := range strings.SplitSeq(strings.ReplaceAll(r.Word(arguments), " ", ""), ",") {
		key, value, _ := strings.Cut(pair, "=")
		switch key {
		case "rank":
			rank, err := strconv.Atoi(value)
			if err != nil || rank < 1 || rank > 1<<20 {
				return nil, r.Fault(arguments, fmt.Sprintf("has rank=%s, expected a number from 1", value), "")
			}
			l.Rank = rank
		case "proj_type":
			l.Projection = value
		case "proj":
			l.Random = apollo && value != "svd"
		case "scale_type":
			l.ByChannel = apollo && value != "tensor"
		}
	}
	if !slices.Contains(LowRankProjections, l.Projection) {
		return nil, r.Fault(arguments, fmt.Sprintf("has proj_type=%s, expected %s", l.Projection,
			fault.OneOf(LowRankProjections...)), "")
	}
	v := r.Find(targets)
	if v.Kind == '"' && strings.ReplaceAll(v.Text, "_", "-") == "all-linear" {
		l.All = true
		return l, nil
	}
	list := []*strict.Value{v}
	if v.Kind == '[' {
		l.Targets, list = v.Texts(), v.Elements
	}
	for _, e := range list {
		pattern, err := r.Pattern(targets, e.At, `\A`, e.Text, `\z`)
		if err != nil {
			return nil, err
		}
		l.patterns = append(l.patterns, pattern)
	}
	return l, nil
}
