package plimsoll

import (
	"go/types"
	"slices"
	"strings"
	"testing"
)

// fieldsWithoutMemory lists the fields of recipe that no other package reads, and why a plan and a rehearsal are
// right without them.
var fieldsWithoutMemory = map[string]string{
	"LoRA.Alpha LoRA.RankScaled Adapter.BaseModel Adapter.FanInFanOut": "scales products, " +
		"names the model, says how weights lie",
	"LoRA.Weights LoRA.SaveProjection":         "how an adapter begins, and what its file has",
	"Adapter.ModulesToSave":                    "read by Adapter.Copies",
	"OFT.Blocks OFT.BlockSize":                 "read by Adapter.OFTBlocks",
	"LowRank.Head LowRank.All LowRank.Targets": "read by LowRank.Has",
	"Unfrozen.Patterns":                        "read by Unfrozen.Has",

	"DataLoader.PersistentWorkers DataLoader.PinMemory DataLoader.PrefetchFactor": "said with the workers, " +
		"which are not planned",

	"Freezes.ModelTypes Freezes.Named": "read by Freezes.Holds and Freezes.Names",

	"Config.Auto Optimizer.Defaulted": "read by recipe, for what the Trainer fills in",

	"Optimizer.TorchAdam": "read by Optimizer.IsFusedAdam",

	"Freeze.Extra Freeze.Layers Freeze.Modules Freeze.Place Freeze.Spread": "read by Freeze.Trained",

	"FSDP.ForwardPrefetch":                  "the next unit is gathered before this one is done in any case",
	"FSDP.SyncModuleStates FSDP.WrapBySize": "follow from cpu_ram_efficient_loading; refused with the policy",

	"Quantization.OffloadCPU Quantization.StorageDType": "other values in as many bytes; " +
		"without effect on a model that is trained",
	"Quantization.SkipPatterns": "read by Quantization.Skips",
	"Quantization.Threshold":    "columns of outliers depend on the data",

	"Sizes.AllgatherBucket": "parameters are gathered in place",

	"Source.DeepSpeed Source.Texts Source.Releases": "what files are read with",

	"TrainerOptimizer.LR TrainerOptimizer.Beta1 TrainerOptimizer.Beta2": "numbers in the step",
	"TrainerOptimizer.Epsilon TrainerOptimizer.WeightDecay":             "numbers in the step",

	"Training.GroupByLength Training.TF32": "the longest batch counts; the same tensors",

	"ZenFlow.UpdateInterval": "when the host steps, not what it holds",
}

// kit lists the types of recipe that say how files are read, and hold nothing that was read.
var kit = strings.Fields("Autofill Kind MadeArguments Program Reader SettingKey")

// TestFieldsOfRecipeAreUsed: every key that is read must be planned with, refused or reported, or stand in the list
// above.
func TestFieldsOfRecipeAreUsed(t *testing.T) {
	excused := map[string]bool{}
	for names := range fieldsWithoutMemory {
		for name := range strings.FieldsSeq(names) {
			excused[name] = true
		}
	}
	used, fields := usedFields(t, "plimsoll/internal/input/recipe")
	for _, name := range fields {
		of, _, _ := strings.Cut(name, ".")
		switch {
		case slices.Contains(kit, of):
		case !used[name] && !excused[name]:
			t.Errorf("recipe.%s is read from files and used by no other package: plan with it, refuse it, or say "+
				"in the plan that it is not planned", name)
		case used[name] && excused[name]:
			t.Errorf("recipe.%s is used: take it off the list", name)
		}
		delete(excused, name)
	}
	for name := range excused {
		t.Errorf("recipe has no field %s: take it off the list", name)
	}
}

// usedFields returns the fields that other packages of the module name, and all exported fields of the exported structs
// of a package and of those in its folder, but strict. Nobody names an embedded struct.
func usedFields(t *testing.T, of string) (used map[string]bool, all []string) {
	used = map[string]bool{}
	names := map[string]string{} // by position, as other packages read fields from export data
	loaded := typedPackages(t)
	within := func(path string) bool {
		return path == of || strings.HasPrefix(path, of+"/") && !strings.HasSuffix(path, "/strict")
	}
	for _, p := range loaded {
		if !within(p.PkgPath) {
			continue
		}
		for _, name := range p.Types.Scope().Names() {
			object, isType := p.Types.Scope().Lookup(name).(*types.TypeName)
			if !isType || !object.Exported() || object.IsAlias() {
				continue
			}
			if s, isStruct := object.Type().Underlying().(*types.Struct); isStruct {
				for field := range s.Fields() {
					if field.Exported() && !field.Embedded() {
						full := name + "." + field.Name()
						names[p.Fset.Position(field.Pos()).String()] = full
						all = append(all, full)
					}
				}
			}
		}
	}
	for _, p := range loaded {
		if within(p.PkgPath) {
			continue
		}
		for _, selection := range p.TypesInfo.Selections {
			if selection.Obj().Pkg() != nil && within(selection.Obj().Pkg().Path()) {
				used[names[p.Fset.Position(selection.Obj().Pos()).String()]] = true
			}
		}
	}
	slices.Sort(all)
	return used, all
}
