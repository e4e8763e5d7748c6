"""What must exist: one row for every entry of the two interface lists, and for each status code, enum value, option key
and extra name of the specification. The test of a row is ``test_<name of the row>``, anywhere in this directory."""

from __future__ import annotations

import ast
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# Interface list -> object -> members, in the order of the lists; "" is the object itself (its constructor or its use).
_LISTS: dict[str, dict[str, str]] = {
    "v1": {
        "llm_datadist": "constructor init finalize link_clusters unlink_clusters check_link_status kv_cache_manager "
        "switch_role",
        "llm_config": "constructor generate_options device_id sync_kv_timeout enable_switch_role ge_options "
        "listen_ip_info mem_utilization buf_pool_cfg",
        "kv_cache_manager": "constructor is_initialized allocate_cache deallocate_cache remove_cache_key pull_cache "
        "copy_cache get_cache_tensors allocate_blocks_cache pull_blocks copy_blocks swap_blocks transfer_cache_async",
        "kv_cache": "constructor cache_id cache_desc per_device_tensor_addrs create_cpu_cache",
        "llm_cluster_info": "constructor remote_cluster_id append_local_ip_info append_remote_ip_info",
        "cache_task": "constructor synchronize get_results",
        "types": "llm_role placement cache_desc cache_key cache_key_by_id_and_index blocks_cache_key "
        "layer_synchronizer transfer_config transfer_with_cache_key_config llm_exception llm_status_code data_type",
    },
    "v2": {
        "llm_datadist": "constructor init finalize link_clusters unlink_clusters switch_role link unlink "
        "query_register_mem_status cache_manager",
        "llm_config": "constructor generate_options device_id sync_kv_timeout ge_options listen_ip_info "
        "enable_cache_manager mem_pool_cfg host_mem_pool_cfg enable_remote_cache_accessible rdma_traffic_class "
        "rdma_service_level local_comm_res link_total_time link_retry_count transfer_backend",
        "cache_manager": "constructor allocate_cache deallocate_cache remove_cache_key pull_cache copy_cache "
        "allocate_blocks_cache deallocate_blocks_cache pull_blocks copy_blocks swap_blocks register_cache "
        "register_blocks_cache transfer_cache_async push_blocks push_cache remap_registered_memory unregister_cache",
        "cache": "constructor cache_id cache_desc tensor_addrs create_cpu_cache",
        "llm_cluster_info": "constructor remote_cluster_id append_local_ip_info append_remote_ip_info",
        "cache_task": "constructor synchronize get_results",
        "types": "llm_role register_mem_status placement cache_desc mem_type mem_info cache_key "
        "cache_key_by_id_and_index blocks_cache_key layer_synchronizer transfer_config transfer_with_cache_key_config "
        "llm_exception llm_status_code data_type",
    },
}

# Present upstream and absent from both lists (spec coverage C).
_EXTRAS = (
    "status llm_config_alias gen_options options cluster_info output_max_size deploy_res_path global_resource_config "
    "tensor tensor_desc is_blocks_cache cache_desc_properties update_dim remote_role_type local_ip_info_list "
    "remote_ip_info_list cluster_id llm_engine_instance mem_type_alias v2_list"
)

_STATUS_CODES = (
    "SUCCESS FAILED WAIT_PROCESS_TIMEOUT KV_CACHE_NOT_EXIST REPEAT_REQUEST REQUEST_ALREADY_COMPLETED PARAM_INVALID "
    "ENGINE_FINALIZED NOT_YET_LINK ALREADY_LINK LINK_FAILED UNLINK_FAILED NOTIFY_PROMPT_UNLINK_FAILED "
    "CLUSTER_NUM_EXCEED_LIMIT PROCESSING_LINK DEVICE_OUT_OF_MEMORY PREFIX_ALREADY_EXIST PREFIX_NOT_EXIST "
    "SEQ_LENOVERLIMIT NO_FREE_BLOCK BLOCKS_OUT_OF_MEMORY EXIST_LINK FEATURE_NOT_ENABLED TIMEOUT LINK_BUSY "
    "OUT_OF_MEMORY DEVICE_MEM_ERROR SUSPECT_REMOTE_ERROR UNKNOWN_ERROR"
)

_ENUM_VALUES = {
    "llm_role": "PROMPT DECODER MIX",
    "placement": "HOST DEVICE",
    "memtype": "MEM_TYPE_DEVICE MEM_TYPE_HOST",
    "register_mem_status": "OK PREPARING FAILED",
    "data_type": "DT_FLOAT DT_FLOAT16 DT_INT8 DT_INT32 DT_UINT8 DT_INT16 DT_UINT16 DT_UINT32 DT_INT64 DT_UINT64 "
    "DT_DOUBLE DT_BOOL DT_STRING DT_BF16",
}

_OPTION_KEYS = (
    "llm.EnableCacheManager llm.EnableRemoteCacheAccessible llm.LocalCommRes llm.TransferBackend "
    "llm.GlobalResourceConfig llm.listenIpInfo llm.MemPoolConfig llm.HostMemPoolConfig llm.SyncKvCacheWaitTime "
    "llm.LinkTotalTime llm.LinkRetryCount llm.RdmaTrafficClass llm.RdmaServiceLevel ge.exec.deviceId "
    "ge.session_device_id ge.flowGraphMemMaxSize llm.MemoryUtilization llm.BufPoolCfg llm.EnableSwitchRole "
    "llm.ClusterInfo llm.OutputMaxSize llm.deployResPath ge.exec.rankId ge.resourceConfigPath llm.RefInputShapes "
    "llm.RefInputDtypes llm.RefInputSeqLenDimIndex llm.kvTensorFormat llm.Role llm.ListenIp llm.ListenPort"
)


def interface_rows() -> list[str]:
    """The 125 rows of the two lists."""
    return [
        f"{version}_{owner}_{member}"
        for version, owners in _LISTS.items()
        for owner, members in owners.items()
        for member in members.split()
    ]


def all_rows() -> list[str]:
    return [
        *interface_rows(),
        *(f"extra_{name}" for name in _EXTRAS.split()),
        *(f"status_{code.lower()}" for code in _STATUS_CODES.split()),
        *(f"enum_{enum}_{value.lower()}" for enum, values in _ENUM_VALUES.items() for value in values.split()),
        *(f"option_{key.replace('.', '_').lower()}" for key in _OPTION_KEYS.split()),
    ]


def defined_tests() -> dict[str, str]:
    """Test functions of this directory and the file of each; a name that is defined twice names both files."""
    found: dict[str, str] = {}
    for path in sorted(_HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = f"{found[node.name]}, {path.name}" if node.name in found else path.name
    return found


def rows_with_tests() -> dict[str, str | None]:
    """For every row ``file::test``, or None when there is none."""
    tests = defined_tests()
    return {row: f"{tests[f'test_{row}']}::test_{row}" if f"test_{row}" in tests else None for row in all_rows()}
