package recipe

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/strict"
)

// LowRank says how GaLore and APOLLO project the gradients of linear modules.
type LowRank struct {
	Rank       int
	Projection string // the side of a matrix that is projected: "std", "reverse_std", "left", "right", "full" for both
	Random     bool   // APOLLO's projection: not of singular vectors
	ByChannel  bool   // APOLLO scales the gradient of each channel
	Head       bool   // the output head may be projected, too

	all      bool
	parts    []string // of paths
	patterns []*regexp.Regexp
	place    fault.Position
}

// NewLowRank returns the defaults of transformers' Trainer, for all linear modules.
func NewLowRank(apollo bool) *LowRank {
	return &LowRank{Rank: 128, Projection: "std", Random: apollo, ByChannel: apollo, Head: true, all: true}
}

// Has reports whether the gradient of a linear module is projected.
func (l *LowRank) Has(module string) bool {
	switch {
	case !l.Head && ends(module, heads):
		return false
	case l.all:
		return true
	}
	return slices.ContainsFunc(l.parts, func(part string) bool { return strings.Contains(module, part) }) ||
		slices.ContainsFunc(l.patterns, func(p *regexp.Regexp) bool { return p.MatchString(module) })
}

// Place returns the place of the settings.
func (l *LowRank) Place() fault.Position { return l.place }

// lowRankProjections are the sides that GaLore knows.
var lowRankProjections = strings.Fields("std reverse_std right left full")

// lowRank reads optim_args and optim_target_modules: _setup_low_rank_optimizer in trainer_optimizer.py, and
// check_target_module_exists in trainer_utils.py of transformers 5.23.
func (r *trainingReader) lowRank(apollo bool) (*LowRank, error) {
	const arguments, targets = "optim_args", "optim_target_modules"
	l := NewLowRank(apollo)
	l.place, l.all = r.Place("optim"), false
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
	if !slices.Contains(lowRankProjections, l.Projection) {
		return nil, r.Fault(arguments, fmt.Sprintf("has proj_type=%s, expected %s", l.Projection,
			fault.OneOf(lowRankProjections...)), "")
	}
	v := r.Find(targets)
	if v.Kind == '"' && strings.ReplaceAll(v.Text, "_", "-") == "all-linear" {
		l.all = true
		return l, nil
	}
	list := []*strict.Value{v}
	if v.Kind == '[' {
		l.parts, list = v.Texts(), v.Elements
	}
	for _, e := range list {
		pattern, err := (&adapterReader{r.Reader}).compile(targets, e.At, `\A`, e.Text, `\z`)
		if err != nil {
			return nil, err
		}
		l.patterns = append(l.patterns, pattern)
	}
	return l, nil
}

// lowRankFactory reads the keys of GaLore or of APOLLO, which begin with their names: _create_galore_optimizer and
// _create_apollo_optimizer in LLaMA-Factory's train/trainer_utils.py.
func (r *frameworkReader) lowRankFactory(name string) error {
	l := &LowRank{Rank: int(r.Integer(name + "_rank")), Projection: r.Word(name + "_proj_type"),
		place: r.Place("use_" + name)}
	if name == "apollo" {
		l.Random, l.ByChannel = r.Word("apollo_proj") == "random", r.Word("apollo_scale_type") == "channel"
	}
	targets := separated(r.Value(name + "_target")).Texts()
	if l.all = len(targets) == 1 && targets[0] == "all"; !l.all {
		l.parts, l.Head = targets, true
	}
	base := r.baseOptimizer()
	kinds := map[string]string{"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}
	if name == "galore" {
		kinds["adafactor"] = "adafactor"
		for _, eight := range []string{"adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"} {
			kinds[eight] = "adamw-8bit"
		}
	}
	kind := kinds[base]
	if kind == "" {
		return r.Fault("use_"+name, fmt.Sprintf("is true, but LLaMA-Factory has no such optimizer for optim %q", base),
			"set optim to adamw_torch")
	}
	r.to.LowRank, r.to.Optimizer = l, name+"-"+kind
	r.to.StepsInBackward = r.Truth(name + "_layerwise")
	return nil
}

// baseOptimizer returns optim of TrainingArguments, or its default.
func (r *frameworkReader) baseOptimizer() string {
	if m := r.arguments.Member("optim"); m != nil && m.Value.Kind == '"' {
		return m.Value.Text
	}
	return "adamw_torch_fused"
}
