package plan

import (
	"testing"

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
)

// withCritic is a job of verl with a critic of the policy's size, and more assignments.
func withCritic(t *testing.T, more string) *Plan {
	t.Helper()
	file := filestest.InNewFolder(t)
	path := file("run.sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.max_prompt_length=256 "+
		"data.max_response_length=256 actor_rollout_ref.model.path=qwen2.5-0.5b actor_rollout_ref.rollout.name=vllm "+
		"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 critic.model.path=qwen2.5-0.5b "+
		"actor_rollout_ref.actor.ppo_mini_batch_size=8 critic.ppo_micro_batch_size_per_gpu=1 "+
		"trainer.n_gpus_per_node=2"+more+"\n")
	return planned(t, job.Request{Configs: []string{path}, GPU: "H100-80GB", HostMemory: 512 * ledger.GiB})
}

// TestCritic holds a critic beside the policy: its parameters, gradients and states on the GPU in its update, or on the
// host in between.
func TestCritic(t *testing.T) {
	stays := withCritic(t, "")
	update, own := in(t, stays, ledger.GPU, ledger.CriticUpdate), in(t, stays, ledger.GPU, ledger.Backward)
	parameters := holds(own, ledger.Parameters)
	head := ledger.Bytes(151936 * 896 * 4 / 2) // the policy's embedding is its head, too, and the critic has one
	if got := holds(update, ledger.CriticParameters); got < parameters-ledger.MiB || got > parameters+head {
		t.Errorf("the critic has %v of parameters, and the policy %v", got, parameters)
	}
	if got := holds(update, ledger.CriticStates); got < 2*parameters-ledger.MiB || got > 2*(parameters+head) {
		t.Errorf("the critic has %v of states beside %v of parameters", got, parameters)
	}
	for _, c := range []ledger.Component{ledger.CriticParameters, ledger.CriticStates} {
		if holds(own, c) != holds(update, c) {
			t.Errorf("%v of %s in the policy's update, and %v in the critic's", holds(own, c), c, holds(update, c))
		}
	}
	moves := withCritic(t, " critic.fsdp.param_offload=True critic.fsdp.optimizer_offload=True")
	own = in(t, moves, ledger.GPU, ledger.Backward)
	if got := holds(own, ledger.CriticParameters) + holds(own, ledger.CriticStates); got > 0 {
		t.Errorf("%v of the critic are on the GPU in the policy's update, and are to wait on the host", got)
	}
	both := 2 * (holds(update, ledger.CriticParameters) + holds(update, ledger.CriticStates)) // of two ranks
	if got := holds(in(t, moves, ledger.Host, ledger.Backward), ledger.CompanionBackup); got != both {
		t.Errorf("%v of the critic are on the host, want %v", got, both)
	}
	if got := holds(in(t, moves, ledger.GPU, ledger.CriticUpdate), ledger.CriticStates); got == 0 {
		t.Error("the critic's states are not on the GPU in its update")
	}
	saved := in(t, moves, ledger.GPU, ledger.Checkpoint)
	if got := holds(saved, ledger.CriticStates); got != holds(update, ledger.CriticStates) {
		t.Errorf("%v of the critic's states are on the GPU while they are saved", got)
	}
	for more, reduces := range map[string]bool{"": true,
		" critic.fsdp.use_no_sync_for_gradient_accumulation=True": false} {
		if got := withCritic(t, more).Job.Companions[0].Job.SyncEachBatch; got != reduces {
			t.Errorf("%q: the critic's gradients are reduced with each micro batch: %v", more, got)
		}
	}
	away := withCritic(t, " actor_rollout_ref.actor.fsdp_config.param_offload=True "+
		"actor_rollout_ref.actor.fsdp_config.optimizer_offload=True")
	update = in(t, away, ledger.GPU, ledger.CriticUpdate)
	if got := holds(update, ledger.Parameters) + holds(update, ledger.OptimizerStates); got > 0 {
		t.Errorf("%v of the policy are on the GPU in the critic's update", got)
	}
	if got := holds(in(t, away, ledger.GPU, ledger.WeightSync), ledger.Parameters); got != parameters {
		t.Errorf("%v of the policy's parameters are on the GPU in the weight sync, want %v", got, parameters)
	}
}

// TestRewardModel holds a frozen model that rewards answers, on the GPU for its pass alone.
func TestRewardModel(t *testing.T) {
	p := withCritic(t, " critic.enable=False reward_model.enable=True reward_model.model.path=qwen2.5-0.5b "+
		"reward_model.micro_batch_size_per_gpu=4 reward_model.model.fsdp_config.param_offload=True")
	if got := holds(in(t, p, ledger.GPU, ledger.Backward), ledger.RewardModel); got > 0 {
		t.Errorf("%v of the reward model are on the GPU in the update", got)
	}
	if holds(in(t, p, ledger.Host, ledger.Backward), ledger.CompanionBackup) == 0 {
		t.Error("the reward model does not wait on the host")
	}
	for i := range p.Devices {
		for _, phase := range p.Devices[i].Phases {
			if phase.Name == ledger.CriticUpdate || holds(&phase, ledger.CriticParameters) > 0 {
				t.Errorf("a critic is planned where none is trained: %s", phase.Name)
			}
		}
	}
}

// TestTiedModelsAreLoadedByEveryRank holds what the ranks of verl hold while they load: the first has the model, but
// for one with tied embeddings, which each rank makes.
func TestTiedModelsAreLoadedByEveryRank(t *testing.T) {
	file := filestest.InNewFolder(t)
	for model, copies := range map[string]ledger.Bytes{"qwen2.5-0.5b": 4, "qwen2.5-7b": 1} {
		path := file(model+".sh", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "+
			"actor_rollout_ref.model.path="+model+" actor_rollout_ref.rollout.name=vllm "+
			"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=4\n")
		p := planned(t, job.Request{Configs: []string{path}, GPU: "H100-80GB", HostMemory: 512 * ledger.GiB})
		full := ledger.Bytes(4 * p.Job.Model.Elements())
		for i := range p.Devices {
			for _, phase := range p.Devices[i].Phases {
				if p.Devices[i].Kind != ledger.Host || phase.Name != ledger.Load {
					continue
				}
				got := holds(&phase, ledger.LoadStaging)
				if off := got - copies*full; off < -ledger.MiB || off > ledger.MiB {
					t.Errorf("%s: the ranks hold %v while they load, want %d copies of %v", model, got, copies, full)
				}
			}
		}
	}
}
