package peft

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
)

// match selects modules by name as PEFT does: check_target_module_exists in
// tuners/tuners_utils.py.
type match struct {
	given     bool
	names     []string         // of modules, or the ends of their names after a dot
	pattern   *regexp.Regexp   // for the full name
	anywhere  []*regexp.Regexp // for some components of the name
	allLinear bool
}

// layers restricts a list of names to some layers.
type layers struct {
	indexes  []int // none means every layer
	patterns []*regexp.Regexp
}

// pattern sets the rank of the modules that it matches.
type pattern struct {
	modules *regexp.Regexp
	rank    int
}

// heads are the names of output embeddings, which "all-linear" excludes. PEFT
// asks the model for them.
var heads = strings.Fields("lm_head embed_out output_layer predictions.decoder")

// IsHead reports whether a module is an output embedding.
func IsHead(module string) bool { return ends(module, heads) }

func (m *match) matches(module string) bool {
	switch {
	case m.allLinear:
		return !IsHead(module)
	case m.pattern != nil:
		return m.pattern.MatchString(module)
	}
	return ends(module, m.names) ||
		slices.ContainsFunc(m.anywhere, func(r *regexp.Regexp) bool { return r.MatchString(module) })
}

// ends reports whether the module is one of the names, or ends in a dot and one
// of them.
func ends(module string, names []string) bool {
	return slices.ContainsFunc(names,
		func(name string) bool { return module == name || strings.HasSuffix(module, "."+name) })
}

func (l *layers) has(module string) bool {
	if len(l.indexes) == 0 {
		return true
	}
	for _, p := range l.patterns {
		if found := p.FindStringSubmatch(module); found != nil {
			index, err := strconv.Atoi(found[1])
			return err == nil && slices.Contains(l.indexes, index)
		}
	}
	return false
}

// Targets reports whether the adapter changes the module with that name, as in
// named_modules. With target_modules "all-linear", call it for linear layers
// only. Without target_modules, call ForModel first.
func (a *Adapter) Targets(module string) bool {
	switch {
	case a.excluded.given && a.excluded.matches(module), a.saved.given && a.saved.matches(module), !a.targets.given:
		return false
	case a.targets.pattern != nil || a.targets.allLinear || slices.Contains(a.targets.names, module):
		return a.targets.matches(module)
	}
	return a.targets.matches(module) && a.layers.has(module)
}

// AllLinear reports whether target_modules is "all-linear".
func (a *Adapter) AllLinear() bool { return a.targets.allLinear }

// Lists reports whether the list target_modules has the name, or an entry that
// ends in a dot and the name. The model need not have such a module.
func (a *Adapter) Lists(name string) bool {
	return slices.ContainsFunc(a.targets.names, func(target string) bool { return ends(target, []string{name}) })
}

// ToLeaves returns the adapter with the last components of the module names that
// its pattern matches in place of the pattern. Other modules may have these, too.
// PEFT does so if transformers has fused experts.
func (a *Adapter) ToLeaves(modules []string) *Adapter {
	if a.targets.pattern == nil {
		return a
	}
	leaves := match{given: true}
	for _, module := range modules {
		if a.Targets(module) {
			leaves.names = append(leaves.names, module[strings.LastIndexByte(module, '.')+1:])
		}
	}
	with := *a
	with.targets = leaves
	return &with
}

// ToParameters returns the adapter with the entries of its list target_modules that end in an old name of experts
// converted to names of parameters. If it has only one of the modules that a parameter joins, missing is the other.
// The rank is that of both together: _convert_peft_config_moe in peft/utils/transformers_weight_conversion.py.
func (a *Adapter) ToParameters(names [][2]string) (converted *Adapter, missing string) {
	with := *a
	with.targets.names, with.Parameters = nil, slices.Clone(a.Parameters)
	found := map[string]bool{}
	for _, target := range a.targets.names {
		at := slices.IndexFunc(names, func(pair [2]string) bool { return ends(target, pair[:1]) })
		if at < 0 {
			with.targets.names = append(with.targets.names, target)
			continue
		}
		found[names[at][0]] = true
		if !slices.Contains(with.Parameters, names[at][1]) {
			with.Parameters = append(with.Parameters, names[at][1])
		}
	}
	var halves, present []string
	for _, pair := range names {
		if pair[1] == "gate_up_proj" {
			halves = append(halves, pair[0])
			if found[pair[0]] {
				present = append(present, pair[0])
			}
		}
	}
	switch len(present) {
	case 0:
	case len(halves):
		with.ranks = append(slices.Clip(a.ranks),
			pattern{regexp.MustCompile(`\A(?:.*\.)?.*\.gate_up_proj\z`), a.Rank * len(halves)})
	default:
		return nil, strings.Join(slices.DeleteFunc(halves, func(h string) bool { return found[h] }), ", ")
	}
	return &with, ""
}

// TargetsParameter reports whether target_parameters has the parameter, by its name or the end of it.
func (a *Adapter) TargetsParameter(name string) bool {
	return a.Parameters != nil && ends(name, a.Parameters)
}

// ParametersPlace returns the position of target_parameters, or of target_modules that PEFT converts to it.
func (a *Adapter) ParametersPlace() fault.Position {
	if a.parametersPlace.Line > 0 {
		return a.parametersPlace
	}
	return a.place
}

// NamesWithin reports whether the name of a module contains an entry of the list
// target_modules.
func (a *Adapter) NamesWithin(module string) bool {
	return slices.ContainsFunc(a.targets.names, func(name string) bool { return strings.Contains(module, name) })
}

// Naming returns the adapter with these modules as its target_modules.
func (a *Adapter) Naming(modules []string) *Adapter {
	with := *a
	with.targets = match{given: true, names: modules}
	return &with
}

// NamesTargets reports whether target_modules is given, or set by ForModel.
func (a *Adapter) NamesTargets() bool { return a.targets.given }

// Place returns the position of target_modules.
func (a *Adapter) Place() fault.Position { return a.place }

// Saves reports whether the module is fully trained, beside the adapter.
func (a *Adapter) Saves(module string) bool {
	return slices.ContainsFunc(a.ModulesToSave, func(name string) bool { return strings.HasSuffix(module, name) })
}

// Copies returns the path of the outermost module that is trained as a copy and
// contains the module or is it. It returns "" if there is none.
func (a *Adapter) Copies(module string) string {
	for end := range len(module) + 1 {
		if end < len(module) && module[end] != '.' {
			continue
		}
		if around := module[:end]; a.Saves(around) || a.Type == "LN_TUNING" && a.Targets(around) {
			return around
		}
	}
	return ""
}

// Feedforward reports whether IA3 scales the input of the module, not its
// output.
func (a *Adapter) Feedforward(module string) bool {
	if a.feedforward.pattern != nil {
		return a.feedforward.matches(module)
	}
	return slices.ContainsFunc(a.feedforward.names, func(name string) bool { return strings.HasSuffix(module, name) })
}

// RankOf returns the rank for a module: of the first rank_pattern entry that
// matches it, or else r.
func (a *Adapter) RankOf(module string) int {
	for _, p := range a.ranks {
		if p.modules.MatchString(module) {
			return p.rank
		}
	}
	return a.Rank
}

// ForModel returns the adapter with PEFT's defaults for the model_type in place of
// the modules that the file does not give.
func (a *Adapter) ForModel(modelType string) (*Adapter, error) {
	with := *a
	if a.Type == "IA3" && !a.feedforward.given {
		list, known := ia3Defaults[modelType]
		if !known {
			return nil, a.place.Inputf("feedforward_modules is not given, and PEFT has no default for %s", modelType).
				WithHint(`add "feedforward_modules": ["down_proj"]`)
		}
		_, feedforward, _ := strings.Cut(list, "|")
		with.feedforward = match{given: true, names: strings.Fields(feedforward)}
	}
	if targets := targetDefaults[a.Type]; !a.targets.given && targets != nil {
		list := targets[modelType]
		switch {
		case strings.HasPrefix(list, ".*"):
			with.targets.pattern = regexp.MustCompile(`\A(?:` + list + `)\z`)
		case list != "":
			with.targets.names = strings.Fields(strings.ReplaceAll(list, "|", " "))
		case a.Parameters != nil:
			return &with, nil
		default:
			return nil, a.place.Inputf("target_modules is not given, and PEFT's %s has no default for %s",
				a.Type, modelType).WithHint(cmp.Or(a.TargetsHint, `add "target_modules": "all-linear", or a list`))
		}
		with.targets.given = true
	}
	return &with, nil
}

// matches compiles all selections of modules.
func (r *adapterReader) matches(a *Adapter) error {
	var err error
	for _, m := range []struct {
		key string
		in  *match
	}{{"target_modules", &a.targets}, {"exclude_modules", &a.excluded}, {"feedforward_modules", &a.feedforward}} {
		if !r.Knows(m.key) { // PEFT does not read it
			continue
		}
		if *m.in, err = r.match(m.key); err != nil {
			return err
		}
	}
	if r.Knows("target_modules") && r.Gives("target_modules") {
		a.place = r.Place("target_modules")
	}
	if len(a.Parameters) > 0 {
		a.parametersPlace = r.Place("target_parameters")
	}
	for _, name := range a.ModulesToSave {
		compiled, err := r.Pattern("modules_to_save", r.At("modules_to_save"), `\A(?:|.*\.)`, name, `(?:|\..*)\z`)
		if err != nil {
			return err
		}
		a.saved.given, a.saved.anywhere = true, append(a.saved.anywhere, compiled)
	}
	if a.Type != "ADALORA" && r.Knows("rank_pattern") && r.Gives("rank_pattern") {
		for _, m := range r.Find("rank_pattern").Members {
			compiled, err := r.Pattern("rank_pattern", m.At, `\A(?:.*\.)?`, m.Name, `\z`)
			if err != nil {
				return err
			}
			a.ranks = append(a.ranks, pattern{compiled, int(m.Value.Integer)})
		}
	}
	return r.fillLayers(&a.layers)
}

func (r *adapterReader) fillLayers(l *layers) error {
	if !r.Knows("layers_to_transform") || !r.Gives("layers_to_transform") {
		return nil
	}
	v := r.Find("layers_to_transform")
	for _, index := range append(v.Elements, v) {
		if index.Kind == '0' {
			l.indexes = append(l.indexes, int(index.Integer))
		}
	}
	// By default, the first number between dots is the layer.
	l.patterns = []*regexp.Regexp{regexp.MustCompile(`\A.*?\.[^.]*\.(\d+)\.`)}
	given := r.Find("layers_pattern")
	if given == nil || given.IsEmpty() {
		return nil
	}
	l.patterns = nil
	for _, p := range append(given.Elements, given) {
		if p.Kind != '"' {
			continue
		}
		compiled, err := r.Pattern("layers_pattern", p.At, `\A.*?\.`, p.Text, `\.(\d+)\.`)
		if err != nil {
			return err
		}
		if compiled.NumSubexp() > 1 {
			return r.Inputf(p.At,
				"layers_pattern has a group, but PEFT takes the first group for the number of the layer").
				WithHint("write (?:...)")
		}
		l.patterns = append(l.patterns, compiled)
	}
	return nil
}

// match reads a list of names, or a pattern for the full name.
func (r *adapterReader) match(key string) (match, error) {
	v := r.Find(key)
	switch {
	case v == nil:
		return match{}, nil
	case v.Kind == '[':
		return match{given: true, names: v.Texts()}, nil
	case key == "target_modules" && strings.EqualFold(v.Text, "all-linear"):
		return match{given: true, allLinear: true}, nil
	}
	compiled, err := r.Pattern(key, v.At, `\A`, v.Text, `\z`)
	return match{given: true, pattern: compiled}, err
}
